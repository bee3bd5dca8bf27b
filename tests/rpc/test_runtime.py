"""What the runtime of production gives to those who wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad.rpc.runtime import ThreadRuntime, Threads


class Transport:
    """What a wait tells it holds nothing up here."""

    def blocking(self) -> None:
        pass

    def call_later(self, delay: float, work: Any) -> Any:
        raise AssertionError


def test_a_notice_between_two_glances_is_not_missed() -> None:
    """The main thread waits a little at a time, so as to look after signals. Who notifies may have
    the lock just when such a time is up."""
    runtime = ThreadRuntime(Threads())
    runtime.transport = Transport()
    condition: Any = runtime.condition()
    time_is_up = threading.Event()
    take_again = condition._acquire_restore

    def acquire_restore(state: object) -> None:
        time_is_up.set()
        take_again(state)

    condition._acquire_restore = acquire_restore
    there = []

    def notify() -> None:
        with condition:
            assert time_is_up.wait(10)
            there.append(1)
            condition.notify_all()

    thread = threading.Thread(target=notify)
    with condition:
        thread.start()
        # What does not come within ten seconds, does not come at all.
        assert condition.wait(10)
    thread.join()
    assert there


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def _no_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The system gives this process no thread, until that is undone."""
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", _no_start)
        yield context


def test_work_for_which_no_thread_can_be_started_waits_for_one(
    threads: Threads, no_thread: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who gives work away has given up a role with it: it must not be lost."""
    nudged, done = [], threading.Event()
    threads.nudge = lambda: nudged.append(1)
    threads.run(done.set)
    threads.run(done.set)
    assert nudged == [1, 1]
    assert threads.has_waiting
    assert capfd.readouterr().err.count("can't start new thread") == 1
    threads.retry()
    assert threads.has_waiting
    no_thread.undo()
    threads.retry()
    assert not threads.has_waiting
    assert done.wait(10)
    threads.close()
    assert threads.await_rest(10)


def test_work_that_waits_for_a_thread_gets_the_next_that_is_free(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, done = threading.Event(), threading.Event()
    threads.run(go.wait)
    monkeypatch.setattr(threading.Thread, "start", _no_start)
    threads.run(done.set)
    assert not done.is_set()
    go.set()
    assert done.wait(10)
