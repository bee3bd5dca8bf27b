"""The tree, inward: what has a class, a name, or only a pickle (see `encode_objects`)."""

from __future__ import annotations

from enum import Enum
from types import MethodType
from typing import Any

from telegrad.wire.classes import dataclass_fields, is_namedtuple
from telegrad.wire.decode import Decoder, register
from telegrad.wire.errors import CodecError
from telegrad.wire.flags import combination
from telegrad.wire.names import EXTENSIONS_BY_NAME, object_named
from telegrad.wire.opaque import TreeUnpickler
from telegrad.wire.tags import Tag
from telegrad.wire.trust import Trust


def read_tree(decoder: Decoder) -> Any:
    value = decoder.value()
    decoder.finish()
    return value


def _named(d: Decoder) -> Any:
    value = object_named(str(d.chunk(), "utf-8", "surrogatepass"), d.trust)
    d.objects.append(value)
    return value


def _method(d: Decoder) -> Any:
    function, self = d.items()
    if not callable(function):
        raise CodecError(f"a method's function is a {type(function).__qualname__}")
    _check_methods_inside(function, d.limits.depth)
    return d.numbered(MethodType(function, self))


def _check_methods_inside(function: object, at_most: int) -> None:
    """A method may be the function of another. Python lets go of such a chain by recursion."""
    for _ in range(at_most):
        if not isinstance(function, MethodType):
            return
        function = function.__func__
    raise CodecError(f"a method is bound more than {at_most} times")


def _read_class(d: Decoder) -> type:
    cls = d.value()
    if not isinstance(cls, type):
        raise CodecError(f"a {type(cls).__qualname__} where a class has to be")
    return cls


def _namedtuple(d: Decoder) -> Any:
    cls: Any = _read_class(d)
    d.expect(Tag.TUPLE)
    items = d.items()
    if not is_namedtuple(cls) or len(items) != len(cls._fields):
        raise CodecError(f"{cls.__qualname__} is no namedtuple of {len(items)} fields here")
    value = tuple.__new__(cls, items)
    if not d.hashed:
        d.objects.append(value)
    return value


def _dataclass(d: Decoder) -> Any:
    cls = _read_class(d)
    names = dataclass_fields(cls)
    if names is None:
        raise CodecError(f"{cls.__qualname__} is not a plain dataclass here")
    obj = d.numbered(object.__new__(cls))
    d.descend()
    if d.size() != len(names):
        raise CodecError(f"{cls.__qualname__} does not have the same fields at both ends")
    for name in names:
        if d.data[d.position] == Tag.ABSENT:
            d.position += 1
        else:
            object.__setattr__(obj, name, d.value())
    for _ in range(d.count(d.limits.items, "attributes")):
        name = d.text()
        if d.trust is Trust.DATA and hasattr(cls, name):
            # A method of the class would be hidden by whatever the peer puts in its place.
            raise CodecError(f"a message sets {name!r}, which is no field of {cls.__qualname__}")
        # Not setattr: a message must not reach __class__ or a property.
        obj.__dict__[name] = d.value()
    d.depth -= 1
    return obj


def _read_enum_class(d: Decoder) -> type[Enum]:
    cls = _read_class(d)
    if not issubclass(cls, Enum):
        raise CodecError(f"{cls.__qualname__} is no enum here")
    return cls


def _enum(d: Decoder) -> Enum:
    cls = _read_enum_class(d)
    name = d.text()
    member = cls.__members__.get(name)
    if member is None:
        raise CodecError(f"{cls.__qualname__} has no member {name!r} here")
    return member


def _enum_value(d: Decoder) -> Enum:
    cls = _read_enum_class(d)
    value = d.value()
    if type(value) is not int:
        raise CodecError(
            f"flags of {cls.__qualname__} are combined to a {type(value).__qualname__}"
        )
    return combination(cls, value) if d.trust is Trust.DATA else cls(value)


def _extension(d: Decoder) -> Any:
    name = d.text()
    extension = EXTENSIONS_BY_NAME.get(name)
    if extension is None:
        raise CodecError(f"the extension {name!r} is not registered on this worker")
    if d.trust is Trust.DATA and extension.trust is not Trust.DATA:
        raise CodecError(f"a {name!r} may hold code, and this worker takes data only")
    d.descend()
    data = d.value()
    d.depth -= 1
    return d.numbered(extension.rebuild(data, d.scope))


def _opaque(d: Decoder) -> Any:
    if d.trust is Trust.DATA:
        raise CodecError("the message holds a pickled object, and this worker takes data only")
    if d.unpickler is None:
        d.unpickler = TreeUnpickler(d.pickled, d.rest_of_buffers())
    attached = d.items()
    d.unpickler.attached += attached
    return d.numbered(d.unpickler.load())


register(
    {
        Tag.NAMED: _named,
        Tag.METHOD: _method,
        Tag.NAMEDTUPLE: _namedtuple,
        Tag.DATACLASS: _dataclass,
        Tag.ENUM: _enum,
        Tag.ENUM_VALUE: _enum_value,
        Tag.EXTENSION: _extension,
        Tag.OPAQUE: _opaque,
    }
)
