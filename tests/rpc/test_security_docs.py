"""What docs/security.md shows runs, and the numbers that it tells are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from telegrad.rpc import meeting, reception
from telegrad.rpc.limits import Limits, default_limits
from telegrad.wire.codec import Trust
from tests.documents import code_in, output_of, page

TEXT = page("security.md")
UNITS = {"GB": 1 << 30, "MB": 1 << 20}


def test_parties_that_take_data_only_work_together(tmp_path: Path) -> None:
    [script] = code_in(TEXT)
    printed = output_of(script, tmp_path, timeout=150)
    assert "tensor([3., 3.])" in printed
    assert "posix:getcwd is not exported; in a job that takes data only" in printed


def number(text: str) -> int:
    digits, _, unit = text.strip().partition(" ")
    return int(digits.replace(",", "")) * UNITS.get(unit, 1)


def test_the_limits_are_those_that_the_text_tells() -> None:
    told = {}
    for name, code, data in re.findall(r"^\| `(\w+)`.*\|([^|]+)\|([^|]+)\|$", TEXT, re.MULTILINE):
        told[name] = (number(code), number(data))
    for field in fields(Limits):
        limits = (default_limits(trust) for trust in (Trust.CODE, Trust.DATA))
        assert told[field.name] == tuple(getattr(each, field.name) for each in limits)
    assert f"At most {reception.PLACES} such connections are held, {meeting.PATIENCE:g} s" in TEXT
    assert f"{reception.PER_SECOND} per second (after a burst of {reception.BURST:,})" in TEXT
