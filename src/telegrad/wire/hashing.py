"""What it may cost to hash and to compare what a message holds.

Keys of dicts and elements of sets are hashed as they are read, and compared with those that have
the same hash. The hashes of numbers, tuples and frozensets are known to everyone, so a few
kilobytes can make that take for hours, or overflow the stack:

- One key that holds an object twice, which holds another twice, and so on: no hash of a dataclass
  or a tuple is remembered, so the last one is computed 2**n times. A frozenset remembers its hash.
  It does not remember what it is equal to, so two such keys of one hash are compared 2**n times.
- Many keys with one hash: the n-th insertion is compared with all before it.
- A long number in an object that many keys share: it is hashed anew for each of them.
- Tuples in tuples, thousands deep: Python hashes them without a look at its stack.

So steps are counted before they are made, and a message has as many as follows from its length. A
step is an object that is passed, each time it is passed; a long one is several steps.

Which steps a comparison takes depends on both sides. Let W(x) be 1 for a plain value, and for one
that has parts 1 and the sum of their W, where each element of a set counts as many times as there
are elements of its hash in the set. Then comparing x with y takes at most sqrt(W(x) * W(y)) steps:
so it is for plain values, and what holds for the parts holds for the whole by Cauchy's inequality,
also in a set, where the a elements of a hash on one side meet the b of that hash on the other. For
the same reason filling a container takes no more steps than the W of it that is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any, TypeAlias

from torch import Tensor

from telegrad.wire.classes import dataclass_fields
from telegrad.wire.errors import CodecError

_DEEP = 1000
"""Levels of a key, as of Python's own stack."""
_BITS_PER_STEP = 1 << 10
_BYTES_PER_STEP = 1 << 10
_ELEMENTS_PER_STEP = 1 << 5

# Hashed in the time that it takes to read them.
_PLAIN = frozenset({bytes, int, float, bool, complex, type(None)})

_Groups: TypeAlias = Collection[tuple[int, Collection[Any]]]
"""Values that are passed next, by how many times each is passed."""
_Look: TypeAlias = Callable[[Any], tuple[int, _Groups]]
"""The steps that a value takes itself, and its parts."""


def steps_to_hash(keys: list[Any], at_most: int) -> int:
    """How many steps the hashes of keys take; refuse more than so many."""
    others = [key for key in keys if type(key) not in _PLAIN]
    return _steps(((1, others),), _hashed, at_most) if others else 0


def steps_to_fill(keys: list[Any], at_most: int) -> int:
    """How many steps the comparisons take when a container is filled with keys; refuse more."""
    groups = [group for group in _by_hash(keys) if group[0] > 1]
    if sum(times * len(group) for times, group in groups) > at_most:
        raise CodecError(f"too many of {len(keys)} keys have the same hash")
    return _steps(groups, _compared, at_most) if groups else 0


def _by_hash(keys: Collection[Any]) -> _Groups:
    """Keys by how many of them have the same hash."""
    hashes = [hash(key) for key in keys]
    if len(set(hashes)) == len(keys):
        return ((1, keys),)
    sharing = Counter(hashes)
    groups: dict[int, list[Any]] = {}
    for key, each in zip(keys, hashes, strict=True):
        groups.setdefault(sharing[each], []).append(key)
    return groups.items()


def _steps(groups: _Groups, look_at: Callable[[type, int], _Look], at_most: int) -> int:
    steps = 0
    looks: dict[type, _Look] = {}
    # Iterators rather than values: few wait at a time, however wide the levels are.
    waiting = [(iter(values), times, 1) for times, values in groups]
    while waiting:
        values, times, level = waiting[-1]
        for value in values:
            cls = type(value)
            look = looks.get(cls)
            if look is None:
                look = looks[cls] = look_at(cls, at_most)
            size, parts = look(value)
            steps += times * size
            if steps > at_most:
                raise CodecError("a key refers to the same objects too many times")
            if parts:
                if level == _DEEP:
                    raise CodecError(f"a key nests deeper than {_DEEP} levels")
                waiting += [(iter(each), times * more, level + 1) for more, each in parts]
                break
        else:
            waiting.pop()
    return steps


def _hashed(cls: type, at_most: int) -> _Look:
    """How to look at what is hashed. Strings, bytes and frozensets remember their hash."""
    if issubclass(cls, tuple):
        return _container
    return _look_of_both(cls, cls.__hash__ is object.__hash__)


def _compared(cls: type, at_most: int) -> _Look:
    """How to look at what is compared. Which elements of a set meet is found by hashing them anew.

    That may cost more than it did when the set was made: an object that holds the set had not all
    of its fields then.
    """

    def elements(value: Collection[Any]) -> tuple[int, _Groups]:
        return 1 + steps_to_hash(list(value), at_most), _by_hash(value)

    def items(value: dict[Any, Any]) -> tuple[int, _Groups]:
        size, keys = elements(value)
        return size, (*keys, (1, value.values()))

    if issubclass(cls, str | bytes | bytearray):
        return lambda value: (1 + len(value) // _BYTES_PER_STEP, ())
    if issubclass(cls, Tensor):
        return lambda value: (1 + value.numel() // _ELEMENTS_PER_STEP, ())
    if issubclass(cls, tuple | list):
        return _container
    if issubclass(cls, set | frozenset):
        return elements
    if issubclass(cls, dict):
        return items
    return _look_of_both(cls, cls.__eq__ is object.__eq__)


def _look_of_both(cls: type, by_identity: bool) -> _Look:
    if issubclass(cls, int):
        return lambda value: (1 + value.bit_length() // _BITS_PER_STEP, ())
    if cls in (range, slice):
        return lambda value: (1, ((1, (value.start, value.stop, value.step)),))
    if cls is MethodType:
        return lambda value: (1, ((1, (value.__func__,)),))
    names = None if by_identity else dataclass_fields(cls)
    if not names:
        return lambda value: (1, ())
    return lambda value: (1, ((1, [getattr(value, name) for name in names]),))


def _container(value: Any) -> tuple[int, _Groups]:
    return 1, ((1, value),)
