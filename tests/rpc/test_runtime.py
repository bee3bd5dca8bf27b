"""What the runtime of production gives to those who wait."""

from __future__ import annotations

import threading
from typing import Any

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
