"""Flags travel; Python keeps every combination for ever, so few can be made by others."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from telegrad.wire import flags
from telegrad.wire.codec import CodecError, Trust, Unpackable, pack, unpack
from telegrad.wire.encode import Encoder
from telegrad.wire.tags import Tag
from tests.wire.codec_samples import Many, Mode, Modes, Rights

BOTH = pytest.mark.parametrize("trust", list(Trust))


def combined(cls: type[Enum], value: Any) -> bytes:
    """A message with a combination of flags that its sender made up."""
    encoder = Encoder(None, Trust.DATA)
    encoder.out.append(Tag.ENUM_VALUE)
    encoder.value(cls)
    encoder.value(value)
    return bytes(2) + encoder.out


def refused(cls: type[Enum], value: Any, match: str) -> None:
    known = len(cls._value2member_map_)
    with pytest.raises(CodecError, match=match) as caught:
        unpack(combined(cls, value), [], trust=Trust.DATA)
    assert len(str(caught.value)) < 500
    assert len(cls._value2member_map_) == known


@BOTH
@pytest.mark.parametrize(
    "value",
    [
        *(Rights.READ | Rights.WRITE, ~Rights.READ, Rights(0), ~Rights(0)),
        *(Modes.READ | Modes.RUN, ~Modes.READ, ~Modes.RUN, ~(Modes.READ | Modes.RUN), Modes(0)),
        *(~Modes(0), ~~Modes.READ, Many.FIRST | Many.LAST),
    ],
    ids=repr,
)
def test_combinations_and_inversions_travel(value: Any, trust: Trust) -> None:
    assert unpack(pack(value, None, trust).meta, [], trust=trust) is value


@pytest.mark.parametrize("value", [-1, -2, -5, -8], ids=str)
def test_negative_numbers_within_the_bits_are_read(value: int) -> None:
    assert unpack(combined(Modes, value), [], trust=Trust.DATA) is Modes(value)


@pytest.mark.parametrize(
    "value",
    [8, 9, -9, 1 << 64, -(1 << 64), 1 << (1 << 20), -(1 << (1 << 20))],
    ids=lambda value: f"{value.bit_length()} bits of {'-+'[value > 0]}",
)
def test_bits_that_nobody_declared_are_refused(value: int) -> None:
    refused(Modes, value, "that Modes does not declare")
    refused(Rights, value, "that Rights does not declare")


def test_what_is_no_flag_is_not_combined() -> None:
    refused(Mode, 1, "Mode has no flags to combine")
    refused(Modes, True, "combined to a bool")
    refused(Modes, "1", "combined to a str")


def test_more_combinations_than_are_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "COMBINATIONS", 100)
    monkeypatch.setattr(flags, "_made", type(flags._made)())
    values = range(3, 103)
    for _ in range(2):
        assert [unpack(combined(Many, n), [], trust=Trust.DATA).value for n in values] == [*values]
    refused(Many, 1001, "send the number instead")
    assert unpack(combined(Modes, 5), [], trust=Trust.DATA) == 5


def test_who_sends_flags_that_nobody_declared_is_told() -> None:
    with pytest.raises(Unpackable, match=r"Modes does not declare it.*send its value"):
        pack([Modes.READ | 8], None, Trust.DATA)
    # A job of workers that trust each other takes them.
    assert unpack(pack(Modes.READ | 8).meta, []) is Modes.READ | 8
