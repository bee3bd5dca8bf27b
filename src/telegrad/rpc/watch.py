"""One thread per worker that looks at what nobody else looks at.

Most messages need no thread of their own: who waits for a reply reads it, who reads a request runs
it. What is left is noticed here: replies that nobody waits for, requests on links that have been
idle, handlers that take so long that another thread must read on, deadlines, timers, and the end of
a connection. The watch itself never runs user code and never blocks but in `epoll`: what takes time
is given to another thread. While nothing runs it sleeps without a wake-up.

A request that begins while the watch sleeps does not wake it, but sets an *alarm*, if none is set:
most requests are over long before, and who has served one and is about to sleep turns the alarm off
again. On a machine with more workers than cores, a watch that was woken for each request, and then
looked again a few times, took as long as the requests did.

Who begins a request notes that it runs and then looks whether the alarm has to be set; who turns it
off says that it has to be, does it, and then looks whether anything runs: of two that meet, one
sees the other. It is also left on for what a tick would have tidied.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import math
import os
import select
import struct
import threading
import time
from collections.abc import Callable

from telegrad.rpc.failures import report_background_error

TICK = 0.004
"""Seconds between two looks while something runs. Each look takes the interpreter from whoever
works, just when that one comes back from the kernel: it must be rare beside calls."""
QUICK_TICK = 0.001
"""The same while something waits to be written."""
REST = 0.012
"""The same where one request follows the other and none runs for long."""
ACTIVE_FOR = 0.05
PAUSE_AFTER_ERROR = 0.05

READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
ENDED = select.EPOLLRDHUP | select.EPOLLONESHOT

_libc = ctypes.PyDLL(None, use_errno=True)  # These calls cannot block.
_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


def _make_alarm() -> int:
    """A descriptor that becomes readable some time after `timerfd_settime`."""
    made: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
    if made < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return made


def _once_after(seconds: float) -> bytes:
    """What `timerfd_settime` is told: no interval, and when."""
    return struct.pack("@llll", 0, 0, *divmod(round(seconds * 1e9), 1_000_000_000))


_AFTER_TICK, _AFTER_REST, _NEVER = _once_after(TICK), _once_after(REST), _once_after(0)


class Timer:
    """Something to do at a time; `cancel` takes it back."""

    __slots__ = ("cancelled", "due", "work")

    def __init__(self, due: float, work: Callable[[], object]) -> None:
        self.due = due
        self.work = work
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        # It stays in the queue until it is due, and would hold on to what it was to work on.
        self.work = _nothing


def _nothing() -> None:
    return None


class Watch:
    """The watching thread. It calls `tick`, which says in how many seconds to call again: never
    (0) if nothing is active."""

    def __init__(
        self,
        tick: Callable[[float], float],
        next_deadline: Callable[[], float],
        run: Callable[[Callable[[], object]], None],
    ) -> None:
        self._tick = tick
        self._next_deadline = next_deadline
        self._run_elsewhere = run
        self._epoll = select.epoll()
        self._alarm = _make_alarm()
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            os.close(self._alarm)
            raise
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._notices: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._closed = False
        self._again = TICK
        self._poked = False
        self.sleeping = False
        self.idle = False
        """It sleeps, and no alarm is set: who begins to serve a request has to set it."""
        self._rang = 0.0
        self._thread = threading.Thread(target=self._live, name="telegrad-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Wake the watch if it sleeps. Safe from anywhere, a garbage collection included."""
        if self.sleeping:
            self._poked = True
            self._rouse()

    def set_alarm(self) -> None:
        """A request has begun: look whether it still runs in a while."""
        self.idle = False
        if not self._closed:
            follows = time.monotonic() < self._rang + REST
            _libc.timerfd_settime(self._alarm, 0, _AFTER_REST if follows else _AFTER_TICK, None)

    def turn_off(self, is_needed: Callable[[], bool]) -> None:
        """The calling thread is about to sleep: the alarm may be of no use any more."""
        if self.idle or self._closed or is_needed():
            return  # What is needed stays as it was set: others would put it off again and again.
        self.idle = True
        _libc.timerfd_settime(self._alarm, 0, _NEVER, None)
        if is_needed():
            self.set_alarm()
            return
        # One who has begun and ended meanwhile may have set what was then turned off; and who
        # began after that may have taken it for set.
        self.idle = True
        if is_needed():
            self.set_alarm()

    def _rouse(self) -> None:
        self.sleeping = False
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def register(self, descriptor: int, notice: Callable[[int], None], events: int) -> None:
        self._notices[descriptor] = notice
        with contextlib.suppress(OSError, ValueError):
            self._epoll.register(descriptor, events)

    def look_for(self, descriptor: int, events: int) -> None:
        """Arm the descriptor for one notice of these events."""
        try:
            self._epoll.modify(descriptor, events)
        except (OSError, ValueError):
            return

    def forget(self, descriptor: int) -> None:
        self._notices.pop(descriptor, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)

    def call_later(self, delay: float, work: Callable[[], object]) -> Timer:
        timer = Timer(time.monotonic() + delay, work)
        with self._lock:
            heapq.heappush(self._timers, (timer.due, next(self._order), timer))
            is_next = self._timers[0][2] is timer
        # Not a poke, after which the watch looks often for a while: an idle worker, too, has a
        # timer that sets itself again.
        if is_next and self.sleeping:
            self._rouse()
        return timer

    def _live(self) -> None:
        active_until = 0.0
        while not self._closed:
            try:
                active_until = max(active_until, self._look(active_until))
            except Exception:
                # Without this thread nothing would be noticed any more: no end, no deadline.
                report_background_error("the watch")
                time.sleep(PAUSE_AFTER_ERROR)
        self._let_go()

    def _let_go(self) -> None:
        self._epoll.close()
        os.close(self._wake)
        os.close(self._alarm)

    def _look(self, active_until: float) -> float:
        """Look once at all that is watched; until when to look often."""
        now = time.monotonic()
        sleeps = now >= active_until
        if sleeps:
            self.sleeping = self.idle = True
            # Work that arrived before we said that we sleep did not poke us, nor set the alarm.
            again = self._tick(now)
            if again:
                self.sleeping = False
                self._again = again
                return now + ACTIVE_FOR
            events = self._epoll.poll(self._until_next(now))
            self.sleeping = False
        else:
            events = self._epoll.poll(self._again)
        if self._closed:
            return 0.0
        for descriptor, event in events:
            if descriptor == self._wake:
                with contextlib.suppress(OSError):
                    os.eventfd_read(self._wake)
                if self._poked:
                    self._poked = False
                    active_until = time.monotonic() + ACTIVE_FOR
            elif descriptor == self._alarm:
                self._rang = time.monotonic()
                with contextlib.suppress(OSError):
                    os.read(self._alarm, 8)
            else:
                notice = self._notices.get(descriptor)
                if notice is not None:
                    notice(event)
        now = time.monotonic()
        self._run_due(now)
        if sleeps and now >= active_until:
            # There is a tick before each sleep, and two in a row would take what has just begun for
            # something that runs for long.
            return active_until
        again = self._tick(now)
        self._again = again or REST
        return now + ACTIVE_FOR if again else active_until

    def _until_next(self, now: float) -> float | None:
        due = self._next_deadline()
        with self._lock:
            if self._timers and self._timers[0][0] < due:
                due = self._timers[0][0]
        return None if due == math.inf else max(0.0, due - now)

    def _run_due(self, now: float) -> None:
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                self._run_elsewhere(timer.work)

    def close(self) -> None:
        self._closed = True
        if self._thread.ident is None:
            # There was no thread for it.
            self._let_go()
            return
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()
