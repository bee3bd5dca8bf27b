"""The watch: what wakes it, and what does not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from telegrad.rpc.watch import Watch
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
