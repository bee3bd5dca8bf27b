"""Which classes are data: their instances can be taken apart and put together without pickle."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

_PICKLE_HOOKS = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
# What @dataclass(frozen=True, slots=True) adds by itself; it says nothing about the class.
_GENERATED_HOOKS = ("_dataclass_getstate", "_dataclass_setstate")

_fields: WeakKeyDictionary[type, tuple[str, ...] | None] = WeakKeyDictionary()


def dataclass_fields(cls: type) -> tuple[str, ...] | None:
    """The fields of a dataclass that is nothing but its fields; None for any other class.

    A class that says how it wants to be pickled or made knows something that its fields do not, and
    so does one with a slot that is no field.
    """
    try:
        return _fields[cls]
    except KeyError:
        names = tuple(field.name for field in fields(cls)) if _is_plain(cls) else None
        if names is not None and _slots_of(cls) - set(names):
            names = None
        _fields[cls] = names
        return names


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _is_plain(cls: Any) -> bool:
    return (
        is_dataclass(cls)
        and cls.__new__ is object.__new__
        and all(getattr(cls, hook, None) is getattr(object, hook, None) for hook in _PICKLE_HOOKS)
        and all(_is_generated(cls, hook) for hook in ("__getstate__", "__setstate__"))
    )


def _slots_of(cls: type) -> set[str]:
    slots: set[str] = set()
    for each in cls.__mro__:
        own = each.__dict__.get("__slots__", ())
        slots.update((own,) if isinstance(own, str) else own)
    return slots - {"__dict__", "__weakref__"}


def _is_generated(cls: Any, hook: str) -> bool:
    function = getattr(cls, hook, None)
    return (
        function is getattr(object, hook, None)
        or getattr(function, "__name__", None) in _GENERATED_HOOKS
    )
