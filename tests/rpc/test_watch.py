"""The watch: what wakes it, and what does not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from telegrad.rpc import watch as watch_module
from telegrad.rpc.watch import REST, TICK, Watch
from tests.rpc.inside import when_settled

TIMERS = 6
APART = 0.06


@pytest.fixture
def looks() -> list[float]:
    return []


@pytest.fixture
def watch(looks: list[float]) -> Iterator[Watch]:
    def tick(now: float) -> float:
        looks.append(now)
        return 0.0

    def run(work: Callable[[], object]) -> None:
        threading.Thread(target=work, daemon=True).start()

    made = Watch(tick, lambda: math.inf, run)
    made.start()
    yield made
    made.close()


def test_timers_of_an_idle_worker_do_not_make_the_watch_look_often(
    watch: Watch, looks: list[float]
) -> None:
    done = threading.Event()
    left = [TIMERS]

    def again() -> None:
        left[0] -= 1
        if left[0]:
            watch.call_later(APART, again)
        else:
            done.set()

    watch.call_later(APART, again)
    assert done.wait(30)
    assert len(looks) <= 3 * TIMERS + 2, "about one when it is set, and two when it is due"


def test_a_timer_that_is_due_before_all_others_wakes_a_watch_that_sleeps(watch: Watch) -> None:
    done = threading.Event()
    watch.call_later(3600, lambda: None)
    watch.call_later(0.01, done.set)
    assert done.wait(30)


def test_a_poke_makes_the_watch_look(watch: Watch, looks: list[float]) -> None:
    reached = threading.Event()
    watch.call_later(0.0, reached.set)
    assert reached.wait(30)
    while not watch.sleeping:
        time.sleep(0.001)  # Who does not sleep is not woken.
    before = len(looks)
    watch.poke()
    assert when_settled(lambda: len(looks) > before + 2)


def when_idle(watch: Watch) -> None:
    while not (watch.sleeping and watch.idle):
        time.sleep(0.001)


def test_a_request_that_begins_has_the_watch_look_a_while_later_and_not_for_long(
    watch: Watch, looks: list[float]
) -> None:
    when_idle(watch)
    before = len(looks)
    watch.set_alarm()
    assert not watch.idle
    when_idle(watch)
    assert before < len(looks) <= before + 2


def test_an_alarm_that_is_turned_off_wakes_nobody(watch: Watch, looks: list[float]) -> None:
    when_idle(watch)
    for _ in range(20):
        before = len(looks)
        watch.set_alarm()
        watch.turn_off(lambda: False)
        assert watch.idle
        rung = threading.Event()
        watch.call_later(2 * TICK, rung.set)  # It looks for that, but not before.
        assert rung.wait(30)
        when_idle(watch)
        if len(looks) - before <= 3:
            return
    raise AssertionError("it was woken each time")


def test_an_alarm_is_kept_for_what_others_run(watch: Watch, looks: list[float]) -> None:
    when_idle(watch)
    before = len(looks)
    watch.set_alarm()
    watch.turn_off(lambda: True)
    assert not watch.idle
    when_idle(watch)
    assert len(looks) > before


def test_an_alarm_rings_later_where_one_request_follows_the_other(watch: Watch) -> None:
    when_idle(watch)
    watch.set_alarm()
    when_idle(watch)
    rang = watch._rang
    watch.set_alarm()
    when_idle(watch)
    assert watch._rang - rang >= REST


def test_an_alarm_that_is_needed_is_not_put_off_by_who_goes_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(lambda now: 1.0, lambda: math.inf, lambda work: work())
    told: list[bytes] = []
    real = watch_module._libc

    class Libc:
        @staticmethod
        def timerfd_settime(descriptor: int, flags: int, when: bytes, old: object) -> int:
            told.append(when)
            return 0

    monkeypatch.setattr(watch_module, "_libc", Libc)
    try:
        watch.set_alarm()
        watch.turn_off(lambda: True)
        assert len(told) == 1
        # One begins after another looked for those that run, and takes the alarm for set.
        looks = iter([False, False, True])
        watch.turn_off(lambda: next(looks))
        assert told[-1] != watch_module._NEVER
        assert not watch.idle
    finally:
        monkeypatch.setattr(watch_module, "_libc", real)
        watch.close()
