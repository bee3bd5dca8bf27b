"""A tensor that passes through values of several workers, and comes back from the last.

The *driver* of a relay names the stages: values, each on its worker, and a method. The first is
given the tensor, each other one what the stage before it returned. Nothing comes back to the driver
but what the last one returns:

    driver --- expect ---> last        a call, answered when the relay is through
    driver --- tensor ---> first --- tensor ---> ... --- tensor ---> last

So a relay over n workers is n + 2 messages, and no worker is disturbed while it computes: a worker
that needed the value of another would have to ask for it. The call is what the driver waits for,
with its deadline, and reads the answer of by itself.

Who comes first to the last worker, the call or the tensor, is not known: the first waits for the
other. A stage that fails tells the driver, whose call fails with its error; it fails, too, if a
worker is lost on the way. Whenever its call does not end well, be it by a deadline or an interrupt,
the driver tells the last worker that the relay is *over*: what waits there is let go. What comes
still later finds the relay among those that were over last, and is dropped.

What must never happen: that a call waits for what nobody will send; that something is kept for a
relay that is over.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import Refused, TelegradError
from telegrad.rpc.failures import describe_error, in_brief, rebuild_error, told_error
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.results import Finish, Later
from telegrad.rpc.wording import of_relayed
from telegrad.wire.codec import unpack
from telegrad.wire.errors import CodecError, Unpackable
from telegrad.wire.frames import Frame
from telegrad.wire.parcel import Parcel

if TYPE_CHECKING:
    from telegrad.rpc.node import Node

EXPECT = "relay.expect"
PASS_ON = "relay.pass_on"
FAILED = "relay.failed"
OVER = "relay.over"

_TICKET = struct.Struct("<QQ")
_STAGE = struct.Struct("<3Q")
MOST_STAGES = 255
MOST_OVER = 1 << 12
"""How many relays that are over are remembered, for what comes late."""
MOST_COURSES = 1 << 8
"""How many courses are remembered, both of those that are begun and of those that are read."""

Ticket = bytes
"""Names a relay in its job: the driver, and a number of its own."""
_END = _TICKET.size
"""A message of a relay is its ticket, and from here on its course."""


def write_ticket(driver: int, number: int) -> Ticket:
    return _TICKET.pack(driver, number)


def _driver_of(ticket: Ticket) -> int:
    """Raises `ValueError` if it is none."""
    try:
        driver: int
        driver, _ = _TICKET.unpack(ticket)
    except struct.error:
        raise ValueError("a relay that does not say whose it is") from None
    return driver


class Course:
    """Where a relay is, and where it leads. It is the same for every tensor that goes this way: a
    driver makes it once, and each stage reads it once."""

    __slots__ = ("here", "is_through", "last", "method", "onward", "owners", "to", "written")

    def __init__(self, stages: tuple[ReferenceId, ...], method: str, at: int = 0) -> None:
        """The stages are values, each with its worker; the relay is at the one of that place."""
        if len(stages) > MOST_STAGES:
            raise ValueError(f"a relay of more than {MOST_STAGES} stages")
        self.method = method
        self.owners = frozenset(stage.owner for stage in stages)
        self.here = stages[at]
        self.last = stages[-1].owner
        self.is_through = at == len(stages) - 1
        """The stage is the last one."""
        self.to = self.last if self.is_through else stages[at + 1].owner
        """The worker of the next stage, if there is one."""
        rest = b"".join((*[_STAGE.pack(*each) for each in stages], method.encode()))
        self.written = bytes((at, len(stages))) + rest
        self.onward = b"" if self.is_through else bytes((at + 1, len(stages))) + rest
        """The same as the next stage is to read it."""


@lru_cache(MOST_COURSES)
def course_through(stages: tuple[ReferenceId, ...], method: str) -> Course:
    """The course of a relay that begins."""
    return Course(stages, method)


@lru_cache(MOST_COURSES)
def read_course(written: bytes) -> Course:
    """The course that was `written`. Raises `ValueError` if it is none."""
    if len(written) < 2:
        raise ValueError("a relay that does not say where it leads")
    at, count = written[0], written[1]
    end = 2 + count * _STAGE.size
    if not at < count or len(written) < end:
        raise ValueError("a relay that is at none of its stages, or does not name them all")
    stages = tuple(map(ReferenceId._make, _STAGE.iter_unpack(written[2:end])))
    return Course(stages, written[end:].decode(), at)


class _Driven:
    """A relay of this worker, until it has ended."""

    __slots__ = ("course", "error", "pending")

    def __init__(self, course: Course) -> None:
        self.course = course
        self.pending: Pending | None = None
        """The call that waits for its end."""
        self.error: BaseException | None = None
        """What went wrong on the way, be it before there was a call."""


_Expected = tuple[Course, Finish]
"""What the last worker keeps: the way, and how to answer the driver."""


class Relays:
    """The relays of one worker: those that it drives, passes on and brings to their end."""

    def __init__(self, node: Node, invoke: Callable[..., object]) -> None:
        """`invoke` runs a method of a value here: see `ValueRequests`."""
        self._node = node
        self._me = node.info.id
        self._invoke = invoke
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._driven: dict[Ticket, _Driven] = {}
        self._expected: dict[Ticket, _Expected] = {}
        self._early: dict[Ticket, Callable[[Finish], None]] = {}
        """What is to be done when the call comes that expects it."""
        self._over: dict[Ticket, None] = {}
        node.on_operation(EXPECT, self._expect)
        node.on_operation(PASS_ON, self._on_call)
        node.on_post(PASS_ON, self._on_pass_on)
        node.on_post(FAILED, self._on_failed)
        node.on_post(OVER, self._on_over)
        node.on_unread(self._on_unread)
        node.on_lost(self._on_lost)

    def counts(self) -> int:
        """How many relays are kept here in whatever way."""
        return len(self._driven) + len(self._expected) + len(self._early)

    # The driver.

    def run(self, course: Course, tensor: Tensor, timeout: float | None, name: str) -> Any:
        """Pass a tensor through the method of all stages; what the last one returns.

        None of the stages is on this worker. Whoever calls keeps the references to them meanwhile.
        `name` is what errors call it.
        """
        node = self._node
        ticket = write_ticket(self._me, next(self._numbers))
        data = ticket + course.written
        driven = self._driven[ticket] = _Driven(course)
        try:
            # What is lost later finds the entry.
            for worker in self._lost_on(course) if node.has_losses else ():
                raise node.loss_of(worker)
            try:
                return self._drive(driven, data, tensor, timeout, name)
            except BaseException:
                node.post(course.last, OVER, ticket)
                raise
        finally:
            del self._driven[ticket]

    def _drive(
        self, driven: _Driven, data: bytes, tensor: Tensor, timeout: float | None, name: str
    ) -> Any:
        node, course = self._node, driven.course
        # The tensor first: the first stage is waited for by all others, and the last can do without
        # the call until it has come through.
        scope = node.crossing.current()
        try:
            node.post(course.here.owner, PASS_ON, Parcel(PASS_ON, data, (tensor,)), scope)
        except Unpackable as error:
            raise of_relayed(error, f"what {name} is given") from error.__cause__
        leaving: list[Callable[[], None]] = []
        last, expects = node.members.member(course.last).info, Parcel(EXPECT, data, ())
        pending = node.call(last, name, (), None, timeout, None, expects, leaving)
        driven.pending = pending
        for leave in leaving:
            leave()
        if driven.error is not None:
            # It may have been told before there was a call.
            self._fail(driven, driven.error)
        return node.wait(pending)

    def _lost_on(self, course: Course) -> list[int]:
        """The workers on that way that are gone."""
        return list(filter(self._node.is_lost, course.owners))

    def _fail(self, driven: _Driven, error: Any) -> None:
        """The driver's call will not be answered as it should."""
        # In this order: who makes the call notes it and then looks for an error.
        driven.error = error
        pending = driven.pending
        if pending is None:
            return
        if self._node.calls.take(pending.callee.id, pending.call_id) is not None:
            pending.settle(None, error)
            pending.complete()

    def _on_failed(self, sender: int, payload: Any) -> None:
        """A stage could not do its part."""
        ticket, told = payload
        driven = self._driven.get(ticket)
        if driven is None:
            return
        if sender not in driven.course.owners:
            raise ValueError("a relay failed on a worker that is none of its stages")
        self._fail(driven, rebuild_error(told_error(told), self._node.trust))

    # A stage.

    def _on_pass_on(self, sender: int, parcel: Any) -> None:
        """The tensor is here: run this stage."""
        if type(parcel) is not Parcel or len(parcel.tensors) != 1:
            raise ValueError("a relay that brings no tensor")
        self._arrived(parcel.data, parcel.tensors[0])

    def _on_unread(self, sender: int, frame: Frame, reason: str) -> None:
        """A tensor was not taken in, as autograd keeps no more of them, say: its driver waits."""
        if self._node.data_only or PASS_ON.encode() not in frame.meta:
            return
        with contextlib.suppress(CodecError):
            parcel = unpack(frame.meta, frame.buffers, None, self._node.trust)
            if type(parcel) is Parcel and parcel.topic == PASS_ON:
                self._tell_failure(parcel.data[:_END], Refused(reason))

    def _on_call(self, sender: int, data: Any, value: Any) -> None:
        """As `_on_pass_on`, for what is not a tensor alone: it may be that it cannot be read here,
        and that is told to who sends it."""
        self._arrived(data, value)

    def _arrived(self, data: bytes, value: Any) -> None:
        node = self._node
        if node.data_only:
            self._refuse()
        ticket, course = data[:_END], read_course(data[_END:])
        if course.here.owner != self._me:
            raise ValueError("a relay came to a worker that has none of its values")
        scope = node.crossing.current()
        if not course.is_through:
            self._run(course, value, partial(self._pass_on, course, ticket, scope))
            return
        if node.values.journey.unconfirmed:
            # They are known to this thread, and another may run the stage.
            node.values.await_confirmed()
        with self._lock:
            expected = self._expected.pop(ticket, None)
            if expected is None:
                if ticket not in self._over and not node.is_lost(_driver_of(ticket)):
                    self._early[ticket] = partial(self._run_within, scope, course, value)
                return
        self._run(course, value, expected[1])

    def _refuse(self) -> NoReturn:
        raise Refused(f"worker {self._node.info.name!r} takes data only and passes none on")

    def _run_within(self, scope: Any, course: Course, value: Any, finish: Finish) -> None:
        self._within(scope, lambda: self._run(course, value, finish))

    def _within(self, scope: Any, work: Callable[[], object]) -> None:
        if scope is None:
            work()
        else:
            with self._node.crossing.enter(self._node, scope):
                work()

    def _run(self, course: Course, value: Any, finish: Finish) -> None:
        """Run the stage and hand on what it returns."""
        try:
            result = self._invoke(self._me, course.here, course.method, (value,), {})
            if type(result) is Later:
                result.subscribe(finish)
                return
        except BaseException as error:
            finish(None, error)
            return
        finish(result, None)

    def _pass_on(
        self, course: Course, ticket: Ticket, scope: Any, value: object, error: BaseException | None
    ) -> None:
        node, to = self._node, course.to
        try:
            if error is not None:
                raise error
            data = ticket + course.onward
            if type(value) is Tensor and to != self._me:
                if node.has_losses and node.is_lost(to):
                    raise node.loss_of(to)
                node.post(to, PASS_ON, Parcel(PASS_ON, data, (value,)), scope)
            else:
                # What is not a tensor alone, or goes to this worker itself.
                on_settled = partial(self._passed_on, ticket)
                info, args = node.members.member(to).info, (data, value)
                self._within(scope, lambda: node.call(info, PASS_ON, args, None, 0, on_settled))
        except Unpackable as problem:
            whose = f"the result of a method on worker {node.info.name!r}"
            told = of_relayed(problem, whose)
            told.__cause__ = problem.__cause__
            self._tell_failure(ticket, told)
        except BaseException as problem:
            self._tell_failure(ticket, problem)

    def _passed_on(self, ticket: Ticket, pending: Pending) -> None:
        try:
            self._node.outcome(pending)
        except BaseException as error:
            self._tell_failure(ticket, error)

    def _tell_failure(self, ticket: Ticket, error: BaseException) -> None:
        node, driver = self._node, _driver_of(ticket)
        told = describe_error(node.info.name, error, node.trust)
        try:
            node.post(driver, FAILED, (ticket, told))
        except ValueError:
            # It is longer than a message may be.
            node.post(driver, FAILED, (ticket, in_brief(told)))

    # The last worker.

    def _expect(self, sender: int, parcel: Any) -> Later:
        if self._node.data_only:
            self._refuse()
        if type(parcel) is not Parcel:
            raise ValueError("a relay is expected that does not say where it leads")
        ticket, course = parcel.data[:_END], read_course(parcel.data[_END:])
        if _driver_of(ticket) != sender or course.last != self._me:
            raise ValueError("a relay is expected by its driver only, and by its last worker")
        return Later(partial(self._await_arrival, ticket, course))

    def _await_arrival(self, ticket: Ticket, course: Course, finish: Finish) -> None:
        with self._lock:
            is_over = ticket in self._over
            arrive = self._early.pop(ticket, None)
            if arrive is None and not is_over:
                self._expected[ticket] = course, finish
        if is_over:
            finish(None, _over())
        elif arrive is not None:
            arrive(finish)
        elif self._node.has_losses:
            # A loss before the entry was made was told to nobody.
            for worker in self._lost_on(course):
                self._let_go_of(worker)

    def _on_over(self, sender: int, ticket: Any) -> None:
        """Nobody waits for what a relay brings; its driver knows."""
        if self._node.data_only:
            return
        if _driver_of(ticket) != sender:
            raise ValueError("whether a relay is over is for its driver to say")
        with self._lock:
            expected = self._expected.pop(ticket, None)
            self._early.pop(ticket, None)
            self._over[ticket] = None
            if len(self._over) > MOST_OVER:
                del self._over[next(iter(self._over))]
        if expected is not None:
            expected[1](None, _over())

    def _on_lost(self, worker: int, reason: str) -> None:
        for driven in list(self._driven.values()):
            if worker in driven.course.owners:
                self._fail(driven, self._node.loss_of(worker))
        self._let_go_of(worker)

    def _let_go_of(self, worker: int) -> None:
        """What is kept here of relays that a worker drives or is on the way of."""
        with self._lock:
            gone = [
                ticket
                for ticket, (course, _) in self._expected.items()
                if worker == _driver_of(ticket) or worker in course.owners
            ]
            lost = [self._expected.pop(ticket) for ticket in gone]
            for kept in (self._early, self._over):
                for ticket in [ticket for ticket in kept if _driver_of(ticket) == worker]:
                    del kept[ticket]
        for _, finish in lost:
            finish(None, self._node.loss_of(worker))


def _over() -> TelegradError:
    return TelegradError("The relay was over before it came here.")
