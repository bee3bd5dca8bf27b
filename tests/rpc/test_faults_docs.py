"""The numbers in docs/faults.md are those of the code."""

from __future__ import annotations

import inspect
import re

from telegrad import rpc
from telegrad.launch import conduct
from telegrad.rpc import cargo, outgoing
from telegrad.rpc.api import LIVENESS
from telegrad.wire.outbox import QUEUE_BYTES
from tests.rpc.fleet import ROOT

TEXT = (ROOT / "docs" / "faults.md").read_text()


def test_the_stated_bounds_are_those_of_the_code() -> None:
    assert f"{outgoing.MAX_CALLS_IN_FLIGHT:,} calls in flight" in TEXT
    assert f"at most {cargo.MOST >> 20} MB of arguments" in TEXT
    assert f"bounded by {QUEUE_BYTES >> 20} MB per link" in TEXT
    assert f"{LIVENESS:g} seconds by default" in TEXT
    assert f"{conduct.LEAVE_SECONDS:g} seconds" in TEXT
    assert inspect.signature(rpc.init_rpc).parameters["liveness"].default == LIVENESS


def test_the_tests_that_the_text_names_are_there() -> None:
    named = re.findall(r"`(\S+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 50
    for path, name in named:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"
