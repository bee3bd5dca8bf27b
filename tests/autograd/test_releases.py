"""Releases are told to others several at a time, and never forgotten."""

from __future__ import annotations

from collections.abc import Callable

from telegrad.autograd.context import Context
from telegrad.autograd.releases import DELAY, MOST_WAITING, Releases


class Clock:
    """Timers that fire when the test says so."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]:
        self.timers.append((delay, work))
        return lambda: None

    def fire(self) -> None:
        _, work = self.timers.pop(0)
        work()


def released(number: int, *workers: int) -> Context:
    context = Context(number)
    for worker in workers:
        context.know(worker)
    return context


def test_contexts_released_close_together_are_told_of_once() -> None:
    clock, told = Clock(), []
    releases = Releases(clock, told.append)
    releases.add(released(1, 5), still_open=0)
    releases.add(released(2, 5, 6), still_open=0)
    assert told == []
    assert [delay for delay, _ in clock.timers] == [DELAY]
    clock.fire()
    assert told == [{5, 6}]


def test_a_release_after_the_timer_starts_another() -> None:
    clock, told = Clock(), []
    releases = Releases(clock, told.append)
    for number in (1, 2):
        releases.add(released(number, 5), still_open=0)
        clock.fire()
    assert told == [{5}, {5}]


def test_many_released_contexts_do_not_wait_for_the_timer() -> None:
    clock, told = Clock(), []
    releases = Releases(clock, told.append)
    for number in range(MOST_WAITING):
        releases.add(released(number, 5), still_open=0)
    assert told == [{5}]
    clock.fire()
    assert told == [{5}]


def test_a_context_that_nobody_else_knows_needs_no_timer() -> None:
    clock, told = Clock(), []
    Releases(clock, told.append).add(released(1), still_open=0)
    assert not clock.timers


def test_what_censuses_list_stays_in_proportion_to_what_was_released() -> None:
    clock, listed = Clock(), []
    count = 1000
    left = count
    releases = Releases(clock, lambda workers: listed.append(left))
    for number in range(count):
        left -= 1
        releases.add(released(number, 5), still_open=left)
    assert sum(listed) <= 2 * count
