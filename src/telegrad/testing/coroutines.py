"""`async def` functions on simulated workers: an event loop that waits for the baton.

It is asyncio's own loop, but where that one would sleep in `select`, this one waits as an activity,
and its clock is the virtual one. So `asyncio.sleep`, locks, queues and tasks work as they do in
production; sockets and subprocesses do not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from telegrad.rpc.coroutines import Coroutines
from telegrad.testing.scheduler import Activity, Killed, Place, Scheduler, current_activity


class SimulatedLoop(asyncio.BaseEventLoop):
    """asyncio's loop over the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._selector = self
        self._poked = False
        self._sleeper: Activity | None = None
        self.set_exception_handler(self._failed)

    @property
    def sleeping(self) -> bool:
        """Whether the loop itself waits, rather than what it runs."""
        return self._sleeper is not None

    def time(self) -> float:
        return self._scheduler.now

    def select(self, timeout: float | None) -> list[Any]:
        if not self._poked and timeout != 0:
            self._sleeper = current_activity()
            try:
                self._scheduler.wait(lambda: "something to do for its coroutines", timeout)
            finally:
                self._sleeper = None
        self._poked = False
        self._scheduler.pause()
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none: nothing is ever selected."""

    def _write_to_self(self) -> None:
        self._poked = True
        if self._sleeper is not None:
            self._scheduler.wake(self._sleeper)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, Killed):
            self._scheduler.fail(error)


class SimulatedCoroutines(Coroutines):
    """Runs the coroutines of one simulated worker."""

    def __init__(self, scheduler: Scheduler, worker: Place) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._worker = worker

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None:
            loop = self._loop = self._start_loop()
        return loop

    def _start_loop(self) -> SimulatedLoop:
        loop = SimulatedLoop(self._scheduler)

        def run() -> None:
            try:
                loop.run_forever()
            finally:
                loop.close()

        def let_go() -> None:
            if not loop.sleeping and self._loop is loop:
                self._loop = None
                self._move_waiting()

        activity = self._scheduler.spawn(f"{self._worker.name}: coroutines", self._worker, run)
        activity.let_go = let_go
        activity.stays = True
        return loop

    def close(self) -> None:
        """The loops end with the run."""
