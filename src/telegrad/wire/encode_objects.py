"""The tree, outward: what has a class, a name, or only a pickle.

Dataclasses, namedtuples and enums are data whose class travels by name; functions are names;
methods are a function and a self. Extensions travel as what they reduce to. The rest is opaque.
"""

from __future__ import annotations

from enum import Enum, Flag
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload, OpOverloadPacket

from telegrad.wire.classes import dataclass_fields, is_namedtuple
from telegrad.wire.encode import WRITERS, Encoder, Writer, write_items
from telegrad.wire.errors import Refusal
from telegrad.wire.flags import is_declared
from telegrad.wire.names import EXTENSIONS, name_of
from telegrad.wire.opaque import TreePickler
from telegrad.wire.primitives import write_size, write_text
from telegrad.wire.tags import Tag
from telegrad.wire.trust import Trust

_ABSENT = object()


def write_tree(obj: Any, scope: object, trust: Trust) -> Encoder:
    encoder = Encoder(scope, trust)
    WRITERS[type(obj)](encoder, obj)
    return encoder


def _named(e: Encoder, obj: Any) -> None:
    memo = e.memo
    if id(obj) in memo:
        e.was_met(obj)
        return
    name = name_of(obj, e.trust)
    e.out.append(Tag.NAMED)
    write_text(e.out, name)
    memo[id(obj)] = len(memo)
    e.kept.append(obj)


def _builtin(e: Encoder, obj: Any) -> None:
    # [].append is bound to a value that has to travel with it; len is bound to its module.
    if obj.__self__ is None or isinstance(obj.__self__, ModuleType | type):
        _named(e, obj)
    else:
        _opaque(e, obj)


def _method(e: Encoder, obj: MethodType) -> None:
    if isinstance(obj.__self__, type):
        _named(e, obj)
        return
    if not e.was_met(obj):
        write_items(e, (obj.__func__, obj.__self__), Tag.METHOD)
        e.number(obj)


def _namedtuple(e: Encoder, obj: Any) -> None:
    if getattr(obj, "__dict__", None):
        _opaque(e, obj)
    elif e.hashed or not e.was_met(obj):
        e.out.append(Tag.NAMEDTUPLE)
        _named(e, type(obj))
        write_items(e, tuple(obj), Tag.TUPLE)
        if not e.hashed:
            e.number(obj)


def _dataclass(e: Encoder, obj: Any) -> None:
    if e.was_met(obj):
        return
    cls = type(obj)
    names = dataclass_fields(cls) or ()
    state = dict(getattr(obj, "__dict__", ()))
    e.out.append(Tag.DATACLASS)
    _named(e, cls)
    e.number(obj)
    e.descend(obj)
    write_size(e.out, len(names))
    for name in names:
        state.pop(name, None)
        field = getattr(obj, name, _ABSENT)
        if field is _ABSENT:
            e.out.append(Tag.ABSENT)
        else:
            e.value(field)
    write_size(e.out, len(state))
    for name, attribute in state.items():
        write_text(e.out, name)
        e.value(attribute)
    e.depth -= 1


def _enum(e: Encoder, obj: Enum) -> None:
    cls = type(obj)
    # A combination of flags is no member and has only a value.
    is_member = cls.__members__.get(obj.name) is obj
    if not is_member and e.trust is Trust.DATA:
        _check_combination(obj)
    e.out.append(Tag.ENUM if is_member else Tag.ENUM_VALUE)
    _named(e, cls)
    if is_member:
        write_text(e.out, obj.name)
    else:
        e.value(obj.value)


def _check_combination(obj: Enum) -> None:
    if not isinstance(obj, Flag) or not is_declared(type(obj), obj.value):
        raise Refusal(
            obj,
            f"{type(obj).__qualname__} does not declare it, and this job takes no other flags; "
            "send its value",
        )


def _extension(e: Encoder, obj: Any) -> None:
    if e.was_met(obj):
        return
    extension = EXTENSIONS[type(obj)]
    if e.trust is Trust.DATA and extension.trust is not Trust.DATA:
        raise Refusal(obj, "it may hold code, and this job takes data only")
    data = extension.reduce(obj, e.scope)
    e.out.append(Tag.EXTENSION)
    write_text(e.out, extension.name)
    e.descend(obj)
    e.value(data)
    e.depth -= 1
    e.kept.append(data)
    e.number(obj)


def _opaque(e: Encoder, obj: Any) -> None:
    if e.was_met(obj):
        return
    if e.trust is Trust.DATA:
        raise Refusal(
            obj,
            "this job takes data only and the type is not data; send a dataclass marked @export, "
            "or register the type with extend",
        )
    if e.pickler is None:
        e.pickler = TreePickler(e.memo.get)
    try:
        e.pickler.dump(obj)
    except Exception as error:
        # Pickling runs code of the object's class, which may raise anything.
        raise Refusal(
            obj,
            f"pickle refuses it: {type(error).__name__}: {error}; leave it out, say in its class "
            "how it pickles (__reduce__ or __getstate__), or send an RRef to it",
        ) from error
    buffers = e.pickler.take_buffers()
    attached, e.pickler.attached = e.pickler.attached, []
    write_items(e, attached, Tag.OPAQUE)
    e.buffers += buffers
    e.number(obj)


def _storage(e: Encoder, obj: Any) -> None:
    raise Refusal(obj, "a storage does not travel by itself; send a tensor that uses it")


# Weak, because classes may be made and dropped at run time.
_writers: WeakKeyDictionary[type, Writer] = WeakKeyDictionary()


def _writer_for(cls: type) -> Writer:
    if cls in EXTENSIONS:
        return _extension
    writer = _writers.get(cls)
    if writer is None:
        writer = _writers[cls] = _suited(cls)
    return writer


def _suited(cls: type) -> Writer:
    if issubclass(cls, type):
        return _named
    if issubclass(cls, Enum):
        return _enum
    if is_namedtuple(cls):
        return _namedtuple
    if dataclass_fields(cls) is not None:
        return _dataclass
    return _opaque


WRITERS.otherwise = _writer_for
WRITERS.update(
    {
        torch.UntypedStorage: _storage,
        torch.TypedStorage: _storage,
        type: _named,
        FunctionType: _named,
        BuiltinFunctionType: _builtin,
        MethodType: _method,
        MethodDescriptorType: _named,
        WrapperDescriptorType: _named,
        ClassMethodDescriptorType: _named,
        GetSetDescriptorType: _named,
        OpOverload: _named,
        OpOverloadPacket: _named,
    }
)
