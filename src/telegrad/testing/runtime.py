"""Time, threads and conditions of a simulated worker."""

from __future__ import annotations

from collections.abc import Callable

from telegrad.rpc.runtime import Condition
from telegrad.testing.scheduler import Activity, Place, Scheduler, current_activity


class SimulatedCondition:
    """As `threading.Condition` over a reentrant lock, for activities.

    To enter it is a place at which others may run, for that is where threads meet in production. A
    thread that is no activity looks at the state of a run that stands still: it is let through.
    """

    __slots__ = ("_depth", "_entering", "_owner", "_scheduler", "_waiting")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Activity | None = None
        self._depth = 0
        self._entering: list[Activity] = []
        self._waiting: list[Activity] = []

    @property
    def guard(self) -> SimulatedCondition:
        return self

    def __enter__(self) -> object:
        me = current_activity()
        if me is None or self._scheduler.running is not me:
            return self
        if self._owner is not me:
            self._scheduler.pause()
            self._acquire(me)
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owner is not None and self._owner is current_activity():
            self._depth -= 1
            if not self._depth:
                self._release()

    def wait(self, timeout: float | None = None) -> bool:
        me = current_activity()
        if me is None or self._owner is not me:
            raise RuntimeError("cannot wait on a condition that is not held")
        depth, self._depth = self._depth, 0
        self._waiting.append(me)
        self._release()
        try:
            self._scheduler.wait(_something_to_change, timeout)
            notified = me not in self._waiting
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        self._acquire(me)
        self._depth = depth
        return notified

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for activity in waiting:
            self._scheduler.wake(activity)

    def _acquire(self, me: Activity) -> None:
        while self._owner is not None:
            self._entering.append(me)
            self._scheduler.wait(_held_by(self._owner))
        self._owner = me

    def _release(self) -> None:
        self._owner = None
        entering, self._entering = self._entering, []
        for activity in entering:
            self._scheduler.wake(activity)


def _something_to_change() -> str:
    return "a condition to change"


def _held_by(owner: Activity) -> Callable[[], str]:
    return lambda: f"a lock that {owner.name} holds"


class SimulatedRuntime:
    """The runtime of a simulated worker."""

    def __init__(self, scheduler: Scheduler, worker: Place) -> None:
        self._scheduler = scheduler
        self._worker = worker

    def now(self) -> float:
        return self._scheduler.now

    def spawn(self, work: Callable[[], object]) -> None:
        self._scheduler.spawn(f"{self._worker.name}: {_name(work)}", self._worker, work)

    def condition(self) -> Condition:
        return SimulatedCondition(self._scheduler)

    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]:
        timer = self._scheduler.at(
            self._scheduler.now + delay, lambda: self.spawn(work), lambda: not self._worker.dead
        )

        def cancel() -> None:
            timer.cancelled = True

        return cancel


def _name(work: Callable[[], object]) -> str:
    return str(getattr(work, "__qualname__", None) or type(work).__name__)
