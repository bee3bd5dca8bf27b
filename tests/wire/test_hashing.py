"""Steps that hashes and comparisons take, counted before they are made."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.wire.errors import CodecError
from telegrad.wire.hashing import steps_to_fill, steps_to_hash
from tests.wire.codec_samples import Node, Noted, Pairing

ROOM = 10_000


class Probe:
    """Of one hash with all others, equal to none, and counts with how many it is compared."""

    compared = 0

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        Probe.compared += 1
        return False


@pytest.mark.parametrize(
    "make",
    [
        lambda: Probe(),
        lambda: (Probe(), Probe()),
        lambda: frozenset(Probe() for _ in range(7)),
        lambda: Pairing(frozenset([Probe(), 5]), frozenset([Probe(), 7])),
        lambda: Noted(1, [{Probe(): Probe()}, {Probe(), Probe()}]),
    ],
    ids=["plain", "tuples", "frozensets", "dataclasses", "not hashed"],
)
@pytest.mark.parametrize("count", [1, 2, 10])
def test_filling_a_container_compares_no_more_than_was_counted(make: Any, count: int) -> None:
    keys = [make() for _ in range(count)]
    Probe.compared = 0
    steps = steps_to_fill(keys, 1 << 30)
    assert Probe.compared == 0
    assert len(set(keys)) == count
    assert Probe.compared <= steps
    assert (Probe.compared > 0) == (count > 1)


def test_distinct_hashes_take_no_comparison() -> None:
    assert steps_to_fill([*range(100), "a", (1, 2), frozenset({1})], 0) == 0


@pytest.mark.parametrize(
    "make", [lambda a: slice(a, a), lambda a: (a, a), Pairing, lambda a: Pairing(a, slice(a, a))]
)
def test_what_is_held_twice_counts_twice(make: Any) -> None:
    """Slices can be hashed from Python 3.12 on."""
    key = make(make(make(1)))
    assert ROOM > steps_to_hash([key], ROOM) > 3
    for _ in range(40):
        key = Pairing(make(key), make(key))
    with pytest.raises(CodecError, match="same objects too many times"):
        steps_to_hash([key], ROOM)


def test_long_numbers_take_many_steps() -> None:
    long = 1 << (1 << 20)
    for key in ((long,), Pairing(long), slice(long), range(long), (range(0, -long, -1),)):
        assert steps_to_hash([key], ROOM) > 1000
    assert steps_to_fill([(-1, "x" * (1 << 20)), (-2, "x" * (1 << 20))], ROOM) > 1000


def test_frozensets_remember_their_hash_and_others_have_an_identity() -> None:
    assert steps_to_hash([frozenset(range(1000)), steps_to_hash, Pairing], ROOM) == 3
    assert steps_to_hash([(Node, object())], ROOM) == 3


def test_levels_are_counted() -> None:
    key: Any = ()
    for _ in range(900):
        key = (key,)
    assert steps_to_hash([key], ROOM) == 901
    for _ in range(200):
        key = (key,)
    with pytest.raises(CodecError, match="deeper than 1000 levels"):
        steps_to_hash([key], ROOM)
