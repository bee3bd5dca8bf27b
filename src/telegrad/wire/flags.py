"""Which combinations of flags a message may make.

Python keeps every combination of flags that was ever made, for as long as the class lives, and an
`IntFlag` takes any number. So what a peer makes that is trusted with data only is bounded twice: by
the bits that the class knows, and by how many combinations of one class such peers make in all.

Bits between those that a class declares are let through: `~` sets them in an `IntFlag`. The class
itself says whether it takes them.
"""

from __future__ import annotations

import threading
from enum import Enum, Flag
from weakref import WeakKeyDictionary

from telegrad.wire.errors import CodecError

COMBINATIONS = 1 << 16
"""Of one class. A class of sixteen flags has no more."""

_lock = threading.Lock()
_made: WeakKeyDictionary[type[Flag], set[int]] = WeakKeyDictionary()


def combination(cls: type[Enum], value: int) -> Enum:
    """The flags that a number stands for; refuse what the class does not have, or one too many."""
    if not issubclass(cls, Flag):
        raise CodecError(f"{cls.__qualname__} has no flags to combine here")
    if not is_declared(cls, value):
        # Without the number, which may be long.
        raise CodecError(f"flags are combined that {cls.__qualname__} does not declare here")
    with _lock:
        made = _made.setdefault(cls, set())
        if value not in made and len(made) >= COMBINATIONS:
            raise CodecError(
                f"{cls.__qualname__} was combined in {COMBINATIONS} ways by messages, and Python "
                "would keep one more for ever; send the number instead"
            )
        flags = cls(value)
        made.add(value)
        return flags


def is_declared(cls: type[Flag], value: int) -> bool:
    """Whether a number has no bit above those that the class declares; `~` gives negative ones."""
    top = max((each.value.bit_length() for each in cls.__members__.values()), default=0)
    return -(1 << top) <= value < 1 << top
