"""Functions and classes travel by name; extension types by the name that they were given.

A name is `module:qualname`. It is looked up when it leaves: what does not lead back to the very
object would on arrival lead to another one, or to none, and the sender is who can repair that.

Under `Trust.DATA` a name is a key of `EXPORTS` and nothing else: no module is imported and no
attribute is followed because a message asks for it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload, OpOverloadPacket

from telegrad.wire.errors import CodecError, Refusal
from telegrad.wire.trust import Trust

T = TypeVar("T")

# torch.ops makes its attributes on demand and is no module that could be imported.
_OPERATORS = "torch.ops"

# A process started by multiprocessing knows the main module under a second name.
_MAIN_NAMES = {"__mp_main__": "__main__"}


@dataclass(frozen=True, slots=True)
class Extension:
    name: str
    cls: type
    reduce: Callable[[Any, Any], Any]
    rebuild: Callable[[Any, Any], Any]
    trust: Trust


EXPORTS: dict[str, object] = {}
EXTENSIONS: dict[type, Extension] = {}
EXTENSIONS_BY_NAME: dict[str, Extension] = {}

# By identity: an object that compares equal to an exported one is another object.
_exported: dict[int, object] = {}
_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
known_names: dict[Any, str] = _names.data  # type: ignore[attr-defined]
"""The same by weak reference, as `_native.cpp` looks at it."""


def export(target: T) -> T:
    """Let a function or class travel under `Trust.DATA`. Serves as a decorator.

    Exporting a dataclass, namedtuple or enum lets a peer make instances with any fields.
    """
    candidates = list(_candidates(target))
    # A decorator runs before the module knows the name, so there may be nothing to find yet.
    name = next((name for name in candidates if _leads_to(name, target)), None)
    if name is None:
        name = next((name for name in candidates if "<" not in name), None)
    if name is None:
        raise TypeError(f"{target!r} has no name to export; define it at the top of a module")
    EXPORTS[name] = _exported[id(target)] = target
    return target


def is_exported(target: object) -> bool:
    """Whether it was exported itself, or is an exported function bound to some object."""
    if id(target) in _exported:
        return True
    return type(target) is MethodType and id(target.__func__) in _exported


def extend(
    name: str,
    cls: type[T],
    reduce: Callable[[T, Any], Any],
    rebuild: Callable[[Any, Any], T],
    *,
    trust: Trust = Trust.CODE,
) -> None:
    """Teach the codec a type: instances of exactly `cls` travel as what `reduce` gives for them.

    The data may hold whatever can be packed. With `trust=Trust.DATA` they travel also between
    workers that take data only: then `rebuild` has to check what it is given, type by type.
    """
    known = EXTENSIONS_BY_NAME.get(name)
    if known is not None and known.cls is not cls:
        raise ValueError(f"the extension {name!r} is taken by {known.cls.__qualname__}")
    extension = Extension(name, cls, reduce, rebuild, trust)
    EXTENSIONS[cls] = extension
    EXTENSIONS_BY_NAME[name] = extension


def name_of(target: Any, trust: Trust) -> str:
    """The name under which a function or class travels; `Refusal` if it has none."""
    try:
        name = _names.get(target)
    except TypeError:
        name = _found(target)
    else:
        if name is None:
            name = _names[target] = _found(target)
    if trust is Trust.DATA and EXPORTS.get(name) != target:
        raise Refusal(
            target, f"{name} is not exported; in a job that takes data only, mark it @export"
        )
    return name


def object_named(name: str, trust: Trust) -> object:
    """What a name that arrived stands for."""
    if trust is Trust.DATA:
        try:
            return EXPORTS[name]
        except KeyError:
            raise CodecError(
                f"{name} is not exported here; this worker takes data only and runs what is "
                f"marked @export in the modules that it has imported"
            ) from None
    try:
        return _looked_up(name, imported)
    except (ImportError, AttributeError, ValueError) as error:
        raise CodecError(
            f"{name} is not found on this worker ({error}); both ends need the same code, and "
            f"what the main script defines is known only to workers that run the same script"
        ) from error
    except Exception as error:
        # From the code of the module that is imported, or of a class that computes attributes.
        raise CodecError(
            f"{name} cannot be looked up on this worker: {type(error).__name__}: {error}"
        ) from error


def imported(name: str) -> ModuleType:
    """As `importlib.import_module`, in less time for a module that is there."""
    module = sys.modules.get(name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        # Another thread may be about to import it: importlib waits for that. The packages around
        # it come first: importlib would await them with the lock of the module taken, while they,
        # in another thread, may await the module, and one of the two would get it half made.
        package, _, _ = name.rpartition(".")
        if package:
            imported(package)
        return importlib.import_module(name)
    return module


def _found(target: Any) -> str:
    for name in _candidates(target):
        if _leads_to(name, target):
            return name
    qualname = getattr(target, "__qualname__", repr(target))
    if "<lambda>" in qualname:
        reason = "a lambda has no name to travel by; define a function at the top of a module"
    elif "<locals>" in qualname:
        reason = f"{qualname} is defined inside a function; move it to the top of a module"
    else:
        module = getattr(target, "__module__", None)
        reason = f"{module}:{qualname} is missing or another object there; send what has that name"
    raise Refusal(target, reason)


def _leads_to(name: str, target: object) -> bool:
    try:
        found = _looked_up(name, sys.modules.__getitem__)
    except (AttributeError, KeyError, ValueError):
        return False
    # Class methods are made anew by each lookup: equal, never identical.
    return found is target or (type(found) is type(target) and bool(found == target))


def _looked_up(name: str, module_named: Callable[[str], ModuleType]) -> object:
    module, _, qualname = name.partition(":")
    found: object = torch.ops if module == _OPERATORS else module_named(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _candidates(target: Any) -> Iterator[str]:
    """Names that may lead to an object. Builtins of torch give only half of theirs, or a wrong
    one: `torch.add` calls itself `_VariableFunctionsClass.add`, methods do not name a module."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        yield f"{_OPERATORS}:{target}"
        return
    owner = getattr(target, "__objclass__", None) or getattr(target, "__self__", None)
    module = getattr(target, "__module__", None) or getattr(owner, "__module__", None)
    module = _MAIN_NAMES.get(str(module), module)
    for attribute in ("__qualname__", "__name__"):
        if name := getattr(target, attribute, None):
            yield f"{module}:{name}"
    if isinstance(target, type):
        # The class of None, and others that say they are builtins, have their names in `types`.
        yield from (f"types:{name}" for name, each in vars(types).items() if each is target)
