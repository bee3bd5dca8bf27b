"""Calls in flight: a core without I/O.

Every call that leaves has one entry here until it is *settled*: by its reply, by its deadline, by
the loss of the worker that it went to, or by the end of the job. Taking the entry out of the table
is what settles it, and that is one atomic step: so of a reply and a timeout that meet, one wins and
the other finds nothing, and no call is settled twice or never.

A settled call holds the reply as it came. It is decoded by whoever wants the result, on that
thread: unpacking may run user code, and no thread that serves others may be held up by it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from threading import Lock, RLock

from telegrad.rpc.errors import CallTimeout, RemoteError, TelegradError, WorkerLost
from telegrad.rpc.failures import UNREADABLE, words_of
from telegrad.rpc.reference_messages import Transfer
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.frames import Frame

Late = Callable[["BaseException | None"], None]
"""Is told how a call ended after its deadline: with that error, or well."""


class Pending:
    """One call in flight, or settled."""

    done = False
    frame: Frame | None = None
    error: TelegradError | None = None
    latch: Lock | None = None
    late: Late | None = None
    carried: Sequence[Transfer] | None = ()
    """The references among its arguments; None once it is known that the call never left."""
    note = b""
    """What a layer above said of it, should it never leave."""
    pressing = True
    """Whether its completion does more than to note the result in a future."""

    def __init__(
        self, call_id: int, callee: WorkerInfo, target: object, timeout: float, deadline: float
    ) -> None:
        self.call_id = call_id
        self.callee = callee
        self.target = target
        self.timeout = timeout
        self.deadline = deadline
        self.completion: list[Callable[[], None]] = []

    def settle(self, frame: Frame | None, error: TelegradError | None = None) -> None:
        """Store the outcome, then wake who waits. Only for the one who took it from the table."""
        self.error = error
        self.store(frame)
        if self.latch is not None:
            self.wake()

    def store(self, frame: Frame | None) -> None:
        """Settle the call, and leave it to the caller of this to wake who waits."""
        self.frame = frame
        self.done = True

    def make_latch(self) -> Lock:
        """What the threads that wait for this call sleep on: one for all, however they wait."""
        if self.latch is None:
            with _making:
                if self.latch is None:
                    self.latch = latched()
        return self.latch

    def wake(self) -> None:
        # A waiter stores its latch and then looks at `done`; we set `done` and then look for the
        # latch: one of the two always sees the other.
        latch = self.latch
        if latch is not None and latch.locked():
            try:
                latch.release()
            except RuntimeError:
                return

    def complete(self) -> None:
        """Run what is to be done once the call is settled, in whichever thread comes first."""
        # Taking an element from a list is atomic: of two threads that come, one finds none.
        try:
            completion = self.completion.pop()
        except IndexError:
            return
        completion()

    def describe(self) -> str:
        return f"{describe_target(self.target)} on worker {self.callee.name!r}"


def afresh(error: BaseException) -> BaseException:
    """A copy of an error that is kept, for raising.

    An error that is raised holds on to the frames that it passes, and they to all that they refer
    to. One that is kept (with a call, a value, a future) must therefore never be raised itself: the
    caller's frame often has the very thing that keeps the error, and neither would ever go.
    """
    kind, words = type(error), words_of(error)
    try:
        # An OSError takes its arguments in `__new__`, and no other `__new__` may make one.
        new = OSError.__new__ if isinstance(error, OSError) else kind.__new__
        again = new(kind, *error.args)
        again.__dict__.update(error.__dict__)
        if words_of(again) != words:
            again = copy.copy(error)
    except Exception:
        again = error
    if again is error or words == UNREADABLE:
        again = RemoteError(f"{kind.__module__}.{kind.__qualname__}: {words}")
    again.__cause__ = error.__cause__
    return again


def without_frames(error: BaseException) -> BaseException:
    """The same error, to be kept: neither it nor what led to it holds on to a frame any more.

    What an error was raised in place of is found by the same thread, in the same frames.
    """
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = None
        if link.__suppress_context__:
            link.__context__ = None
        chain += (link.__cause__, link.__context__)
    return error


# A handler of a signal may call, and wait, while its thread has this.
_making = RLock()


def latched() -> Lock:
    """A lock that is held: who acquires it waits until it is released."""
    latch = Lock()
    latch.acquire()
    return latch


def describe_target(target: object) -> str:
    """A name for a call's function that a person can search for."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    module = getattr(target, "__module__", None)
    if name is None:
        return repr(target)
    # torch.add and others say that they belong to a class that nobody knows.
    name = str(name).removeprefix("_VariableFunctionsClass.")
    return f"{module}.{name}" if module else name


class Method:
    """What a call of an owner's method is called in errors; keeps its reference alive meanwhile."""

    __slots__ = ("method", "rref")
    __module__ = ""

    def __init__(self, rref: object, method: str) -> None:
        self.rref = rref
        self.method = method

    @property
    def __name__(self) -> str:
        return f"method {self.method!r} of {self.rref!r}"


def kind_of(target: object) -> int:
    """A number by which waits are told apart: for a call of this, or for what comes after it.

    A method is another object each time, and so may be what describes a call.
    """
    if type(target) is str:
        return hash(target)
    return hash(target.method) if type(target) is Method else id(target)


class _Tables(dict[int, dict[int, Pending]]):
    """By callee, made when they are first asked for."""

    def __missing__(self, callee: int) -> dict[int, Pending]:
        return self.setdefault(callee, {})


class Calls:
    """The table of calls that this worker made and that are not settled."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._to = _Tables()
        # Calls whose deadline has passed and that may still be answered, and who wants to know.
        self._late: dict[int, dict[int, Late | None]] = {}
        self._lock = Lock()
        self.next_deadline = math.inf

    def begin(self, callee: WorkerInfo, target: object, timeout: float, now: float) -> Pending:
        """A new entry. `timeout` 0 means that the call may take for ever."""
        deadline = now + timeout if timeout > 0 else math.inf
        pending = Pending(next(self._ids), callee, target, timeout, deadline)
        self._to[callee.id][pending.call_id] = pending
        return pending

    def open_to(self, callee: int) -> dict[int, Pending]:
        """Those to one worker, by their numbers, now and later: who pops one has to settle it."""
        return self._to[callee]

    def take(self, callee: int, call_id: int) -> Pending | None:
        """Take the entry out, in order to settle it. None: someone else did, or it never was."""
        table = self._to.get(callee)
        return None if table is None else table.pop(call_id, None)

    def is_open(self, callee: int, call_id: int) -> bool:
        table = self._to.get(callee)
        return table is not None and call_id in table

    def total(self) -> int:
        return sum(len(table) for table in self._to.values())

    def all(self) -> list[Pending]:
        return [pending for table in list(self._to.values()) for pending in list(table.values())]

    def expire(self, now: float) -> list[Pending]:
        """Settle every call whose deadline has passed; note when to look again."""
        expired = []
        soonest = math.inf
        with self._lock:
            self.next_deadline = math.inf
        for pending in self.all():
            if pending.deadline <= now:
                if self.expire_one(pending):
                    expired.append(pending)
            elif pending.deadline < soonest:
                soonest = pending.deadline
        self.look_by(soonest)
        return expired

    def look_by(self, deadline: float) -> bool:
        """Note that a deadline is to be looked at. Whether it is sooner than all others."""
        with self._lock:
            if deadline >= self.next_deadline:
                return False
            self.next_deadline = deadline
            return True

    def take_late(self, callee: int, call_id: int) -> Late | None:
        """Whom to tell of a call that ends after its deadline."""
        late = self._late.get(callee)
        return None if late is None else late.pop(call_id, None)

    def expects(self, callee: int) -> bool:
        """Whether that worker has something to answer, be it too late: it may hold references."""
        return bool(self._to.get(callee) or self._late.get(callee))

    def expire_one(self, pending: Pending) -> bool:
        if not self._take_expired(pending):
            return False
        pending.settle(
            None,
            CallTimeout(
                f"RPC ran for more than {pending.timeout * 1000:g} milliseconds and timed out: "
                f"{pending.describe()} has not answered. Give the call more time (timeout=), or "
                "look at what that worker is doing (telegrad.rpc.debug_info())."
            ),
        )
        return True

    def _take_expired(self, pending: Pending) -> bool:
        worker, call_id = pending.callee.id, pending.call_id
        with self._lock:
            if not self.is_open(worker, call_id):
                return False
            # Before it is taken out: who then finds that the answer is late finds whom to tell.
            late = self._late.setdefault(worker, {})
            late[call_id] = pending.late
            if self.take(worker, call_id) is None:
                late.pop(call_id, None)
                return False
        return True

    def fail(self, callee: int | None, error: TelegradError) -> list[Pending]:
        """Settle with an error every call to that worker (None: to all workers)."""
        workers = list(self._to) if callee is None else [callee]
        failed = []
        for worker in workers:
            self._late.pop(worker, None)
            for call_id in list(self._to.get(worker, ())):
                pending = self.take(worker, call_id)
                if pending is not None:
                    pending.settle(None, _about(error, pending))
                    failed.append(pending)
        return failed


def _about(error: TelegradError, pending: Pending) -> TelegradError:
    what = f"the call {pending.describe()}"
    if isinstance(error, WorkerLost):
        return WorkerLost.of(error.worker, error.cause, what)
    return type(error)(f"{error} Pending was {what}.")
