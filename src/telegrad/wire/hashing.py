"""What it may cost to hash what a message holds.

Keys of dicts and elements of sets are hashed as they are read, and a few kilobytes can make that
take for hours, in two ways:

- Many keys with one hash: the n-th insertion is compared with all before it. The hashes of numbers
  and tuples are known to everyone, so such keys are easily made. Here the distinct hashes of a
  large container are counted, and few keys may share one.
- One key that holds an object twice, which holds another twice, and so on: no hash of a dataclass
  or a tuple is remembered, so the last one is computed 2**n times. Here the objects that a hash
  passes are counted, each time it passes them, and their number is bounded by the message's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.wire.classes import dataclass_fields
from telegrad.wire.errors import CodecError

LARGE = 1024
_SHARED_HASHES = 64


def check_hashes(keys: Sequence[Any]) -> None:
    """Refuse keys of which too many have the hash of another."""
    if len(keys) - len({hash(key) for key in keys}) > _SHARED_HASHES:
        raise CodecError(f"too many of {len(keys)} keys have the same hash")


def hashed_objects(key: Any, at_most: int) -> int:
    """How many objects the hash of a key passes; refuse more than so many."""
    count = 0
    left = [key]
    while left:
        value = left.pop()
        count += 1
        if count > at_most:
            raise CodecError("a key refers to the same objects too many times")
        if isinstance(value, tuple):
            left += value
        else:
            left += [getattr(value, name) for name in _hashed_fields(type(value))]
    return count


def _hashed_fields(cls: Any) -> tuple[str, ...]:
    """The fields of a dataclass that is hashed by them, not by its identity."""
    return () if cls.__hash__ is object.__hash__ else dataclass_fields(cls) or ()
