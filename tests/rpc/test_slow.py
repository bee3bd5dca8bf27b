"""Which functions count as slow."""

from __future__ import annotations

import threading
import time

import pytest

from telegrad.rpc import slow
from telegrad.rpc.slow import Run, SlowFunctions


def function() -> None:
    pass


@pytest.fixture
def known() -> SlowFunctions:
    found = SlowFunctions()
    found.was_slow(function)
    assert found.expects(function)
    return found


def test_a_run_that_was_only_kept_from_its_core_is_quick(
    known: SlowFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.of(function)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 1.0)
    monkeypatch.setattr(time, "thread_time", lambda: run.used)
    monkeypatch.setattr(slow, "_waits", lambda: run.waits)
    known.ended(run)
    assert not known.expects(function)


def test_a_run_that_waits_for_something_is_not_quick(known: SlowFunctions) -> None:
    run = Run.of(function)
    threading.Event().wait(2 * slow.QUICK)
    known.ended(run)
    assert known.expects(function)


def test_a_run_that_computes_is_not_quick(known: SlowFunctions) -> None:
    run = Run.of(function)
    while time.thread_time() - run.used < 2 * slow.QUICK:
        pass
    known.ended(run)
    assert known.expects(function)
