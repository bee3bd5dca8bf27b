"""A whole job in one process: `simulate`.

A run has three phases. In the first the main functions run. When they have ended, what is still
under way is let come to rest (the *drain*), for the promise is that what is released is gone
everywhere. Then whatever is left on the survivors is counted: that is `Result.leaks`.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from telegrad.rpc import failures
from telegrad.rpc.arguments import check_bound, check_whole
from telegrad.rpc.members import Member, Members
from telegrad.rpc.node import DEFAULT_TIMEOUT
from telegrad.rpc.worker import WorkerInfo
from telegrad.testing.coroutines import SimulatedCoroutines
from telegrad.testing.faults import BACKWARD, Cut, Faults, Kill, Moment
from telegrad.testing.futures import futures_wait_in
from telegrad.testing.network import Network
from telegrad.testing.runtime import SimulatedRuntime
from telegrad.testing.scheduler import Activity, Killed, Scheduler
from telegrad.testing.trace import Event, render
from telegrad.testing.transport import SimulatedNode, SimulatedTransport

Main = Callable[[], Any]
LAST_EVENTS = 40
REAL_PATIENCE = 60.0


class SimulationFailed(AssertionError):
    """A simulated run showed something that must never happen. Its text says how to replay it."""

    def __init__(self, message: str, seed: int, trace: Sequence[Event] = ()) -> None:
        super().__init__(message)
        self.seed = seed
        self.trace = tuple(trace)


class WorkerKilled(Exception):
    """What became of a main function whose worker was killed, as the faults asked."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    `values` and `errors` hold what the main functions returned and raised, by worker; `leaks` what
    was left on each surviving worker after the drain, empty if nothing was; `messages` how many
    messages were sent: faults can strike `at` any number up to this.
    """

    seed: int
    values: Mapping[str, Any]
    errors: Mapping[str, BaseException]
    leaks: Mapping[str, Mapping[str, Any]]
    messages: int
    time: float
    trace: tuple[Event, ...] = field(repr=False)
    _first: str = field(repr=False, default="")

    @property
    def value(self) -> Any:
        """What the main function of the first worker returned, or its error raised."""
        error = self.error
        if error is not None:
            raise error
        return self.values[self._first]

    @property
    def error(self) -> BaseException | None:
        """What the main function of the first worker raised."""
        return self.errors.get(self._first)


class _Worker:
    """One simulated worker."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.dead = False
        self.node: SimulatedNode
        self.transport: SimulatedTransport


class _Trigger:
    """Waits for the moment of a fault among the messages."""

    def __init__(self, moment: Moment, scheduler: Scheduler, strike: Callable[[], None]) -> None:
        self._moment = moment
        self._strike = strike
        self._left = moment.nth or scheduler.random.randint(1, 8)
        self._struck = False
        self.never_came = moment.during is not None
        """No message has had what `during` says in its label."""
        if moment.after is not None:
            scheduler.at(moment.after, strike)

    def sent(self, number: int, label: str) -> None:
        moment = self._moment
        if self._struck or moment.after is not None:
            return
        if moment.during is not None:
            if moment.during not in label:
                return
            self.never_came = False
            self._left -= 1
            self._struck = self._left == 0
        else:
            self._struck = number == moment.at
        if self._struck:
            self._strike()


class _Job:
    """The workers of one run, from their making to the count of what they left."""

    def __init__(
        self, names: Sequence[str], seed: int, faults: Faults, timeout: float, limits: _Limits
    ) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed, self._at_rest, limits.deadline)
        self.network = Network(self.scheduler, faults, self._sent)
        self.faults = faults
        self.limits = limits
        self.messages = 0
        self.values: dict[str, Any] = {}
        self.errors: dict[str, BaseException] = {}
        self.leaks: dict[str, dict[str, Any]] = {}
        self._mains: dict[str, Activity] = {}
        self._rests = 0
        self._names = names
        members = [Member(WorkerInfo(name, number), 1) for number, name in enumerate(names)]
        self._members = Members(members, size=len(members))
        self.workers = {name: _Worker(name, self.scheduler.draw_weight()) for name in names}
        for number, worker in enumerate(self.workers.values()):
            self._furnish(worker, number, timeout)
        self._triggers = [self._kill_trigger(kill) for kill in faults.kills]
        self._triggers += [self._cut_trigger(cut) for cut in faults.cuts]

    def _furnish(self, worker: _Worker, number: int, timeout: float) -> None:
        members = self._members.seen_by_another()
        runtime = SimulatedRuntime(self.scheduler, worker)
        worker.node = SimulatedNode(
            WorkerInfo(worker.name, number),
            members,
            runtime,
            timeout=timeout,
            liveness=self.faults.liveness,
        )
        worker.node.coroutines = SimulatedCoroutines(self.scheduler, worker)
        worker.transport = SimulatedTransport(self.scheduler, self.network, worker, worker.node)
        worker.transport.on_lose = lambda other: self._left_alone(other, number)
        worker.node.transport = worker.transport

    # Mains.

    def start(self, mains: Mapping[str, Main]) -> None:
        for name, main in mains.items():
            self._mains[name] = self._start(self._named(name), main)

    def _start(self, worker: _Worker, main: Main) -> Activity:
        def run() -> None:
            try:
                self.values[worker.name] = main()
            except Killed:
                raise
            except BaseException as error:
                self.errors[worker.name] = error
                traceback.clear_frames(error.__traceback__)

        return self.scheduler.spawn(f"{worker.name}: main", worker, run)

    @property
    def _mains_run(self) -> bool:
        return any(main in self.scheduler.alive for main in self._mains.values())

    def _named(self, name: str) -> _Worker:
        worker = self.workers.get(name)
        if worker is None:
            raise ValueError(
                f"There is no worker {name!r} in this simulation; its workers are "
                f"{', '.join(self._names)}."
            )
        return worker

    # Faults.

    def _sent(self, worker: str, label: str) -> None:
        self.messages += 1
        for trigger in self._triggers:
            trigger.sent(self.messages, label)

    def check_that_faults_made_sense(self) -> None:
        """A fault that names what the program never does was not tested, and a test that believes
        so would pass. If something else went wrong, that may be why it was not done."""
        if self.errors or any(event.what in ("dies", "cut") for event in self.scheduler.trace):
            return
        faults: tuple[Kill | Cut, ...] = (*self.faults.kills, *self.faults.cuts)
        for fault, trigger in zip(faults, self._triggers, strict=True):
            # That one cannot be misspelt, and programs drawn at random may do without it.
            if trigger.never_came and fault.moment.during != BACKWARD:
                raise ValueError(
                    f"Faults().{fault} never struck: none of the {self.messages} messages of the "
                    f"run has {fault.moment.during!r} in its label. Result.trace has their labels."
                )

    def _kill_trigger(self, kill: Kill) -> _Trigger:
        worker = self._named(kill.worker)
        return _Trigger(kill.moment, self.scheduler, lambda: self._kill(worker))

    def _kill(self, worker: _Worker) -> None:
        if worker.dead or not self._mains_run:
            return
        if self._mains.get(worker.name) in self.scheduler.alive:
            self.errors[worker.name] = WorkerKilled(f"Worker {worker.name!r} was killed.")
        self.scheduler.record("dies", worker.name, "")
        worker.dead = True
        me = worker.node.info.id
        self.network.ports[me].dead = True
        self.network.lose_what_left(me)
        self.scheduler.kill(worker)
        for other in self.workers.values():
            if other is not worker:
                self._tell_of_loss(other, me, "its process has died", self._soon())

    def _soon(self) -> float:
        random = self.scheduler.random
        return 0.0 if random.random() < 0.5 else random.uniform(0.0, self.faults.detect)

    def _tell_of_loss(self, worker: _Worker, lost: int, reason: str, delay: float) -> None:
        def tell() -> None:
            name = f"{worker.name}: loss of {worker.node.members.name(lost)}"
            self.scheduler.spawn(name, worker, lambda: worker.transport.lose(lost, reason))

        self.scheduler.at(self.scheduler.now + delay, tell, lambda: not worker.dead)

    def _left_alone(self, other: int, by: int) -> None:
        """A worker is done with another: if that one lives, it notices that it is shut out."""
        left = self.workers[self._names[other]]
        if not left.dead and left.transport.accepts_from(by):
            self._tell_of_loss(left, by, "it has ended the connection", self._soon())

    def _cut_trigger(self, cut: Cut) -> _Trigger:
        one, other = self._named(cut.one), self._named(cut.other)
        return _Trigger(cut.moment, self.scheduler, lambda: self._cut(one, other, cut.lasting))

    def _cut(self, one: _Worker, other: _Worker, lasting: float | None) -> None:
        a, b = one.node.info.id, other.node.info.id
        self.scheduler.record("cut", one.name, f"from {other.name}")
        links = self.network.between(a, b)
        for link in links:
            link.cut()
        if lasting is not None and lasting <= self.faults.liveness:
            for link in links:
                self.scheduler.at(self.scheduler.now + lasting, link.mend)
            return
        for worker, lost in ((one, b), (other, a)):
            wait = self.faults.liveness + self._soon()
            self._tell_of_loss(worker, lost, "its connection broke and did not come back", wait)

    # Coming to rest.

    def _at_rest(self) -> bool:
        """Nothing can happen and no timer is left before the limit. Whether to go on."""
        if self._mains_run:
            raise self._stuck()
        if self._rests == 0:
            self.scheduler.time_limit = self.scheduler.now + self.limits.drain
        self._rests += 1
        if self._rests <= 3:
            gc.collect()
            return True
        self.leaks = self._count_leaks()
        return False

    def _stuck(self) -> SimulationFailed:
        now, limit = self.scheduler.now, self.scheduler.time_limit
        waiting = "\n".join(self.scheduler.describe_alive())
        events = render(self.scheduler.trace[-LAST_EVENTS:])
        return SimulationFailed(
            f"The simulation with seed {self.seed} does not end: at {now:.3f} s of virtual time "
            f"nothing can happen any more before the deadline of {limit:g} s.\n"
            f"Who waits for what:\n{waiting}\n"
            f"The last events:\n{events}\n"
            f"To replay it: {self.replay()}",
            self.seed,
            self.scheduler.trace,
        )

    def replay(self) -> str:
        return f"simulate(..., seed={self.seed}) with the same workers, faults and main."

    def _count_leaks(self) -> dict[str, dict[str, Any]]:
        leaks = {}
        for worker in self.workers.values():
            if not worker.dead:
                left = _left_on(worker, self.scheduler)
                if left:
                    leaks[worker.name] = left
        return leaks

    def close(self) -> None:
        for worker in self.workers.values():
            worker.node.closed = True


def _left_on(worker: _Worker, scheduler: Scheduler) -> dict[str, Any]:
    node = worker.node
    left: dict[str, Any] = {
        f"references: {what}": count for what, count in node.values.debug_info().items()
    }
    left["relays"] = node.relays.counts()
    left["calls in flight"] = [pending.describe() for pending in node.calls.all()]
    left["activities"] = [a.name for a in scheduler.alive if a.worker is worker and not a.stays]
    for name, service in node.services.items():
        counts = getattr(service, "counts", None)
        if counts is not None:
            left.update({f"{name}: {what}": count for what, count in counts().items()})
    return {what: count for what, count in left.items() if count}


@dataclass(frozen=True, slots=True)
class _Limits:
    deadline: float
    drain: float


def simulate(
    main: Main | Mapping[str, Main],
    workers: Sequence[str] = ("a", "b", "c"),
    *,
    seed: int = 0,
    faults: Faults | None = None,
    allow: type[BaseException] | tuple[type[BaseException], ...] = (),
    timeout: float = DEFAULT_TIMEOUT,
    deadline: float = 600.0,
    drain: float = 600.0,
) -> Result:
    """Run a job of several workers in this process, under one interleaving that `seed` decides.

    `main` runs on the first worker, or is a dict with a function for each of some workers. It uses
    `telegrad.rpc` and `telegrad.autograd` as any program does. An error that it raises is raised
    here, with the seed noted on it, unless its type is in `allow`: then it is in `Result.errors`.

    `timeout` bounds calls as `rpc_timeout` does in `init_rpc`; main must end before `deadline`,
    and what it left behind has `drain` to come to rest. All are seconds of virtual time. A run
    that cannot end raises `SimulationFailed`, which says who waits for what.
    """
    _check_workers(workers)
    mains = main if isinstance(main, Mapping) else {workers[0]: main}
    _check_mains(mains)
    _check_allowed(allow)
    check_whole("seed", seed)
    check_bound("timeout", timeout)
    check_bound("deadline", deadline)
    check_bound("drain", drain)
    job = _Job(workers, seed, faults or Faults(), timeout, _Limits(deadline, drain))
    with _collected_on_purpose(), futures_wait_in(job.scheduler), _errors_reported_to(job):
        job.start(mains)
        job.scheduler.run()
        _await_end(job)
        job.close()
    _raise_failure(job, allow)
    job.check_that_faults_made_sense()
    return Result(
        seed,
        job.values,
        job.errors,
        job.leaks,
        job.messages,
        job.scheduler.now,
        tuple(job.scheduler.trace),
        next(iter(mains)),
    )


def _check_workers(workers: object) -> None:
    if isinstance(workers, str) or not isinstance(workers, Sequence) or not workers:
        raise TypeError(f"workers={workers!r}: give a list of names, of at least one worker")
    for name in workers:
        WorkerInfo(name, 0)
        if workers.count(name) > 1:
            raise ValueError(
                f"the worker name {name!r} is given twice: each worker needs a name of its own"
            )


def _check_mains(mains: Mapping[str, Main]) -> None:
    if not mains:
        raise ValueError("main={}: give a function for at least one worker, or nothing runs")
    for name, main in mains.items():
        if not callable(main):
            raise TypeError(
                f"what is to run on worker {name!r} is {main!r}, which cannot be called: give a "
                "function"
            )


def _check_allowed(allow: object) -> None:
    for each in allow if isinstance(allow, tuple) else (allow,):
        if not isinstance(each, type) or not issubclass(each, BaseException):
            raise TypeError(f"allow={allow!r}: give a class of errors, or a tuple of them")


def _raise_failure(job: _Job, allow: type[BaseException] | tuple[type[BaseException], ...]) -> None:
    failure = job.scheduler.failure
    if failure is None:
        unasked = [
            error for error in job.errors.values() if not isinstance(error, (WorkerKilled, allow))
        ]
        if not unasked:
            return
        failure = unasked[0]
    if not isinstance(failure, SimulationFailed):
        failure.add_note(f"In the simulation with seed {job.seed}. To replay it: {job.replay()}")
    raise failure


def _await_end(job: _Job) -> None:
    """Wait in real time; a thread that blocks in earnest would hold everything up for ever."""
    scheduler = job.scheduler
    steps = -1
    while not scheduler.over.acquire(timeout=REAL_PATIENCE):
        if steps == scheduler.steps:
            alive = "\n".join(scheduler.describe_alive())
            raise SimulationFailed(
                f"The simulation with seed {job.seed} has not moved for {REAL_PATIENCE:g} s of "
                "real time: a function blocks on something that is not simulated (a lock, a "
                f"socket, a thread of its own).\n{alive}\nTo replay it: {job.replay()}",
                job.seed,
                scheduler.trace,
            )
        steps = scheduler.steps


@contextlib.contextmanager
def _collected_on_purpose() -> Iterator[None]:
    """Garbage is collected when the run says so, and only what the run has made."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _errors_reported_to(job: _Job) -> Iterator[None]:
    """An error that no caller waits for fails the run instead of being printed."""
    import sys

    printing = failures.tell_background_error

    def report(where: str) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        error.add_note(f"In {where}; no caller waits for it.")
        job.scheduler.fail(error)

    failures.tell_background_error = report
    try:
        yield
    finally:
        failures.tell_background_error = printing
