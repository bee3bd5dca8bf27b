"""What a node needs of the world it runs in: time, threads, and ways to wait.

Production answers with real threads and a real clock, `telegrad.testing` with threads that take
turns under a seeded scheduler and a clock that only moves when nobody can run. Code above the
transport waits through these and nothing else, so that the same code runs in both.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from telegrad.wire import interrupts
from telegrad.wire.at_exit import leave_threads_behind


class Condition(Protocol):
    """As `threading.Condition`: hold it, wait on it, notify."""

    @property
    def guard(self) -> AbstractContextManager[object]:
        """What holds it when it is entered, as it does itself: its lock, which is sooner taken."""
        ...

    def __enter__(self) -> object: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> object: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Runtime(Protocol):
    """Time and threads."""

    def now(self) -> float: ...
    def spawn(self, work: Callable[[], object]) -> None: ...
    def condition(self) -> Condition: ...
    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]:
        """Run `work` on some thread after `delay` seconds; the result cancels it."""
        ...


class Threads:
    """Threads made when needed and kept for the next piece of work; never a limit on how many.

    A limit would be a pool that nested calls could exhaust. What bounds the number of threads is
    the number of calls in flight, and callers are bounded in that.

    The system may have a limit, though. Who gives work away has as a rule given up a role with it,
    and cannot take it back: so work for which no thread can be had is not refused. It waits until
    one is done with other work, or until `retry` finds that there can be one.
    """

    KEPT = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parked: list[_Parked] = []
        self._waiting: deque[Callable[[], object]] = deque()
        self.nudge: Callable[[], object] = _nobody_retries
        """Told that work waits for a thread: `retry` is to be called now and then."""
        self._said = False
        self._closed = False
        self._busy = 0
        self._rest = threading.Condition(self._lock)
        _all_threads.add(self)

    def run(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._busy += 1
            parked = self._parked.pop() if self._parked else None
        if not self._begin(work, parked):
            with self._lock:
                self._waiting.append(work)
            self.nudge()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def retry(self) -> None:
        """Have threads do what waits for one, as far as there are any."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                work = self._waiting.popleft()
                parked = self._parked.pop() if self._parked else None
            if not self._begin(work, parked):
                with self._lock:
                    self._waiting.appendleft(work)
                return

    def _begin(self, work: Callable[[], object], parked: _Parked | None) -> bool:
        """Have a thread work, a new one if none is parked. Whether there is one."""
        if parked is not None:
            parked.work = work
            parked.latch.release()
            return True
        # A thread keeps its arguments for as long as it lives: they must not hold the work.
        parked = _Parked()
        parked.work = work
        try:
            threading.Thread(
                target=self._live, args=(parked,), name="telegrad", daemon=True
            ).start()
        except (RuntimeError, MemoryError) as error:
            self._say_once(error)
            return False
        return True

    def _say_once(self, error: BaseException) -> None:
        """Others only see that this worker does not answer."""
        if not self._said:
            self._said = True
            print(
                f"telegrad: this process gets no more threads ({error}): it has "
                f"{threading.active_count()}, and what needs another waits. Raise the limit on "
                "processes (ulimit -u, or pids.max of its cgroup), or make fewer calls at a time",
                file=sys.stderr,
            )

    def _live(self, parked: _Parked) -> None:
        work, parked.work = parked.work, None
        while work is not None:
            try:
                work()
            finally:
                work = None
                self._done()
            with self._lock:
                if self._waiting:
                    work = self._waiting.popleft()
                    continue
                if self._closed or len(self._parked) >= self.KEPT:
                    return
                self._parked.append(parked)
            parked.latch.acquire()
            work, parked.work = parked.work, None

    def _done(self) -> None:
        with self._lock:
            self._busy -= 1
            if self._closed and not self._busy:
                self._rest.notify_all()

    def await_rest(self, timeout: float) -> bool:
        """After `close`: whether all work ended in that time."""
        with self._lock:
            return self._rest.wait_for(lambda: not self._busy, timeout)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
        for each in parked:
            each.latch.release()


def _nobody_retries() -> None:
    """What waits for a thread gets the next that is done with its work."""


_PATIENCE_AT_EXIT = 2.0
_all_threads: weakref.WeakSet[Threads] = weakref.WeakSet()
os.register_at_fork(after_in_child=_all_threads.clear)  # They are not there.


@atexit.register
def _await_rest() -> None:
    """A thread that is inside of torch while the interpreter ends is better awaited."""
    until = time.monotonic() + _PATIENCE_AT_EXIT
    everybody = list(_all_threads)
    for threads in everybody:
        threads.close()
    if not all(threads.await_rest(max(0, until - time.monotonic())) for threads in everybody):
        leave_threads_behind()


class _Parked:
    __slots__ = ("latch", "work")

    def __init__(self) -> None:
        self.latch = threading.Lock()
        self.latch.acquire()
        self.work: Callable[[], object] | None = None


class _Below(Protocol):
    """What the runtime leaves to the transport."""

    def blocking(self) -> None: ...
    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]: ...


class _Condition(threading.Condition):
    """Tells the transport before it waits, so that another thread serves requests meanwhile."""

    def __init__(self, runtime: ThreadRuntime) -> None:
        self._runtime = runtime
        self._notices = 0
        self._waiting = 0
        self.guard = threading.RLock()
        super().__init__(self.guard)

    def wait(self, timeout: float | None = None) -> bool:
        self._runtime.transport.blocking()
        ends = math.inf if timeout is None else time.monotonic() + timeout
        known = self._notices
        self._waiting += 1
        try:
            while not super().wait(interrupts.at_a_time(ends - time.monotonic())):
                interrupts.run_put_off()
                # Notified after its time was up and before it had the lock: Python says False.
                if self._notices != known:
                    return True
                if time.monotonic() >= ends:
                    return False
            return True
        finally:
            self._waiting -= 1

    def notify_all(self) -> None:
        self._notices += 1
        if self._waiting:
            super().notify_all()


class ThreadRuntime:
    """The runtime of production."""

    transport: _Below

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    now = staticmethod(time.monotonic)

    def spawn(self, work: Callable[[], object]) -> None:
        self._threads.run(work)

    def condition(self) -> Condition:
        return _Condition(self)

    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]:
        return self.transport.call_later(delay, work)
