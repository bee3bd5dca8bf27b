"""Threads that take turns: one seed, one interleaving.

Everything that happens on a simulated worker is an *activity*: its main function, a request that
it serves, work that it spawned, a timer that fired. Each runs on a thread of its own, because user
code blocks where it likes, but only the one that has the *baton* runs. Whoever has to wait gives
the baton back. There is no thread that schedules: the activity that gives the baton back makes the
next decision itself, and hands over only if another one is to run.

A decision is one draw from all that could happen next: an activity that can run, a packet that can
arrive, a timer that is due. The clock is virtual. It stands still while anything can happen, and
then jumps to the next timer. When there is no timer either, everybody waits for ever.

The rules:

1.  All state of a simulation is touched only by the holder of the baton, so nothing has a lock.
2.  What a decision runs in place (a packet that arrives, a timer) is the simulator's own and never
    waits. User code runs in activities.
3.  Every source of chance is the one random generator. Activities, packets and timers stand in
    lists, never in sets; the automatic garbage collection is off during a run, as it would call
    finalizers at moments that depend on what ran before. So a seed replays exactly.
4.  An activity of a killed worker, or of a run that is over, is ended by `Killed` at its next wait,
    and at each wait that its clean-up tries: it cannot hold anything up.

What must never happen: a thread that holds the baton blocks on something real, a lock or a socket.
The rest would wait for it without end. The one who started the run sees to that, with a real clock.
"""

from __future__ import annotations

import contextlib
import contextvars
import heapq
import itertools
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from telegrad.rpc.current import set_thread_node
from telegrad.rpc.node import Node
from telegrad.rpc.runtime import Threads
from telegrad.testing.trace import Event

_threads = Threads()


class Killed(BaseException):
    """Ends an activity whose worker is gone. User code has no reason to catch it."""


class Source(Protocol):
    """Something other than an activity that can happen next."""

    weight: float

    def fire(self) -> bool:
        """Let it happen. Whether there is more."""
        ...


class Place(Protocol):
    """Where activities belong: a worker."""

    name: str
    weight: float
    dead: bool

    @property
    def node(self) -> Node: ...


class Activity:
    """One thread of one simulated worker."""

    __slots__ = (
        "let_go",
        "name",
        "started",
        "stays",
        "thread",
        "topic",
        "turn",
        "waits_for",
        "wakes",
        "work",
        "worker",
    )

    def __init__(self, name: str, worker: Place, work: Callable[[], object]) -> None:
        self.name = name
        self.worker = worker
        self.work: Callable[[], object] | None = work
        self.started = False
        self.thread = 0
        self.turn = threading.Lock()
        self.turn.acquire()
        self.waits_for: Callable[[], str] | None = None
        self.wakes: Timer | None = None
        self.topic = ""
        """Of the post that it is about to make."""
        self.stays = False
        """Whether it is there for as long as its worker is, and not a piece of work."""
        self.let_go: Callable[[], object] | None = None
        """What to do before it waits: a request that waits lets the next one begin."""

    def __repr__(self) -> str:
        return f"<activity {self.name}>"


class Timer:
    """Something that is to happen at a time, if it is still wanted then."""

    __slots__ = ("action", "cancelled", "time", "wanted", "weight")

    def __init__(
        self, time: float, action: Callable[[], object], wanted: Callable[[], bool]
    ) -> None:
        self.time = time
        self.action = action
        self.wanted = wanted
        self.weight = 1.0
        self.cancelled = False

    def fire(self) -> bool:
        if not self.cancelled and self.wanted():
            self.action()
        return False


class _Local(threading.local):
    activity: Activity | None = None


_local = _Local()


def current_activity() -> Activity | None:
    """The activity that the calling thread is; None outside of simulations."""
    return _local.activity


def _always() -> bool:
    return True


class Scheduler:
    """Activities, sources and timers of one run, and the baton."""

    def __init__(self, seed: int, quiet: Callable[[], bool], time_limit: float) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.time_limit = time_limit
        self.trace: list[Event] = []
        self.alive: dict[Activity, None] = {}
        self.ending = False
        self.failure: BaseException | None = None
        self.running: Activity | None = None
        self.over = threading.Lock()
        self.over.acquire()
        self._quiet = quiet
        self._runnable: list[Activity] = []
        self._ready: list[Source] = []
        self._timers: list[tuple[float, float, int, Timer]] = []
        self._numbers = itertools.count()
        # Half of the seeds draw evenly. In the others some workers and links are slow, as without
        # that no run would see one message overtaken by a hundred.
        self._even = self.random.random() < 0.5
        self._restlessness = self.random.choice((0.0, 0.05, 0.3))

    def record(self, what: str, worker: str, about: str) -> None:
        self.trace.append(Event(self.now, what, worker, about))

    def draw_weight(self) -> float:
        return 1.0 if self._even else 10 ** self.random.uniform(-2, 0)

    # What can happen.

    def spawn(self, name: str, worker: Place, work: Callable[[], object]) -> Activity:
        activity = Activity(name, worker, work)
        if not (self.ending or worker.dead):
            self.alive[activity] = None
            self._runnable.append(activity)
        return activity

    def add(self, source: Source) -> None:
        self._ready.append(source)

    def at(
        self, time: float, action: Callable[[], object], wanted: Callable[[], bool] = _always
    ) -> Timer:
        """Have `action` happen at a time, if it is still wanted then. A time that has come is a
        thing that can happen now, in any order with the rest."""
        timer = Timer(time, action, wanted)
        if time <= self.now:
            self._ready.append(timer)
        elif time < math.inf:
            entry = (time, self.random.random(), next(self._numbers), timer)
            heapq.heappush(self._timers, entry)
        return timer

    # Waiting and waking; only for the activity that runs.

    def wait(self, waits_for: Callable[[], str], timeout: float | None = None) -> None:
        """Give the baton back until someone wakes the calling activity, or the time is up."""
        me = self._me()
        if me.let_go is not None:
            me.let_go()
        me.waits_for = waits_for
        if timeout is not None:
            me.wakes = self.at(self.now + max(timeout, 0.0), lambda: self.wake(me))
        self._give_up_baton(me)

    def wake(self, activity: Activity) -> None:
        """Let a waiting activity run again."""
        if activity.waits_for is None:
            return
        activity.waits_for = None
        if activity.wakes is not None:
            activity.wakes.cancelled = True
            activity.wakes = None
        self._runnable.append(activity)

    def pause(self) -> None:
        """A place at which another activity may run, as in production at any place."""
        me = self._me()
        if self._restlessness and self.random.random() < self._restlessness:
            self._runnable.append(me)
            self._give_up_baton(me)

    def pause_unharmed(self) -> None:
        """As `pause`, where torch would log what is raised: the end comes at the next wait."""
        with contextlib.suppress(Killed):
            self.pause()

    def check_alive(self) -> None:
        """End the calling activity here if its worker has been killed."""
        self._me()

    def _me(self) -> Activity:
        me = _local.activity
        if me is None or me is not self.running:
            raise RuntimeError(
                "A thread that is not one of the simulation's waits in it. Threads that user code "
                "starts cannot take part: use rpc_async to this worker instead."
            )
        if self.ending or me.worker.dead:
            raise Killed
        return me

    def _give_up_baton(self, me: Activity) -> None:
        self.running = None
        successor = self._next()
        if successor is not me:
            assert successor is not None, "an activity that waits is alive"
            self._hand_to(successor)
            me.turn.acquire()
        self.running = me
        if self.ending or me.worker.dead:
            raise Killed

    # The baton.

    def run(self) -> None:
        """From the outside: begin. `over` is released at the end."""
        first = self._next()
        if first is None:
            self.over.release()
        else:
            self._hand_to(first)

    def _hand_to(self, activity: Activity) -> None:
        if activity.started:
            activity.turn.release()
        else:
            _threads.run(lambda: self._live(activity))

    def _live(self, activity: Activity | None) -> None:
        """A thread: run an activity, and then whichever new one the baton goes to."""
        while activity is not None:
            self._perform(activity)
            successor = self._next()
            if successor is None:
                self.over.release()
            elif successor.started:
                successor.turn.release()
                successor = None
            activity = successor

    def _perform(self, activity: Activity) -> None:
        activity.started = True
        activity.thread = threading.get_ident()
        work, activity.work = activity.work, None
        assert work is not None
        self.running = _local.activity = activity
        set_thread_node(activity.worker.node)
        try:
            contextvars.Context().run(work)
        except Killed:
            pass
        except BaseException as error:
            self.fail(error)
        finally:
            self.running = _local.activity = None
            set_thread_node(None)
            self.alive.pop(activity, None)

    # Decisions.

    def _next(self) -> Activity | None:
        """Let things happen until an activity is to run. None: nothing is left alive."""
        while not self.ending:
            try:
                activity = self._decide()
            except BaseException as error:
                self.fail(error)
                continue
            if activity is not None:
                return activity
        return self._runnable.pop() if self._runnable else None

    def _decide(self) -> Activity | None:
        """Let one thing happen; if that is an activity, it is the next to run."""
        runnable, ready = self._runnable, self._ready
        self.steps += 1
        if not runnable and not ready:
            if not self._advance_clock() and not self._quiet():
                self.end()
            return None
        place = self._draw(runnable, ready)
        if place < len(runnable):
            runnable[place], runnable[-1] = runnable[-1], runnable[place]
            return runnable.pop()
        place -= len(runnable)
        source = ready[place]
        ready[place] = ready[-1]
        ready.pop()
        if source.fire():
            ready.append(source)
        return None

    def _draw(self, runnable: list[Activity], ready: list[Source]) -> int:
        count = len(runnable) + len(ready)
        if count == 1:
            return 0
        if self._even:
            return int(self.random.random() * count)
        weights = [activity.worker.weight for activity in runnable]
        weights += [source.weight for source in ready]
        return self.random.choices(range(count), weights)[0]

    def _advance_clock(self) -> bool:
        while self._timers:
            timer = self._timers[0][-1]
            if timer.cancelled or not timer.wanted():
                heapq.heappop(self._timers)
            elif timer.time > self.time_limit:
                return False
            else:
                heapq.heappop(self._timers)
                self.now = timer.time
                self._ready.append(timer)
                return True
        return False

    # Endings.

    def kill(self, worker: Place) -> None:
        """End the activities of a worker that is marked dead; each at its next chance to run."""
        for activity in [a for a in self.alive if a.worker is worker]:
            if not activity.started:
                del self.alive[activity]
                self._runnable.remove(activity)
            elif activity.waits_for is not None:
                self.wake(activity)

    def fail(self, error: BaseException) -> None:
        """The run cannot go on; the first error counts."""
        if self.failure is None:
            self.failure = error
        if not self.ending:
            self.end()

    def end(self) -> None:
        """End every activity; the run is over when they are gone."""
        self.ending = True
        self._ready.clear()
        self._timers.clear()
        for activity in list(self.alive):
            if not activity.started:
                del self.alive[activity]
        self._runnable = [a for a in self.alive if a is not self.running]
        for activity in self._runnable:
            activity.waits_for = None

    def describe_alive(self) -> list[str]:
        """Who is alive, what each waits for and where."""
        frames = sys._current_frames()
        lines = []
        for activity in self.alive:
            waits = activity.waits_for
            what = "is running" if waits is None else f"waits for {waits()}"
            lines.append(f"  {activity.name} {what}")
            frame = frames.get(activity.thread) if activity.started else None
            lines += [f"      {line}" for line in _places(frame)]
        return lines


def _places(frame: FrameType | None) -> list[str]:
    """The last few places in code other than the simulator's."""
    if frame is None:
        return []
    hidden = ("threading.py", "contextlib.py", "telegrad/testing/")
    stack = traceback.extract_stack(frame)
    shown = [f for f in stack if not any(part in f.filename for part in hidden)]
    return [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in shown[-4:]]
