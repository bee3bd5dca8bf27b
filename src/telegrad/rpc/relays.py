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
other. A stage that fails tells the driver, whose call fails with its error, and who then tells the
last worker to expect nothing any more; from anyone else that could come before the call. If a
worker is lost on the way, the driver's call fails for that; and so does what is expected on the
last one, should the driver have given up before.

What must never happen: that a call waits for what nobody will send; that something is kept for a
relay that is over.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import Refused, TelegradError
from telegrad.rpc.failures import describe_error, rebuild_error, told_error
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.results import Finish, Later
from telegrad.wire.parcel import Parcel

if TYPE_CHECKING:
    from telegrad.rpc.node import Node

EXPECT = "relay.expect"
PASS_ON = "relay.pass_on"
FAILED = "relay.failed"
OVER = "relay.over"

_HEAD = struct.Struct("<QQBB")
"""The driver, the number that it gave, at which stage, and how many there are."""
_STAGE = struct.Struct("<3Q")
MOST_STAGES = 255

Ticket = tuple[int, int]
"""Names a relay in its job: the driver, and a number of its own."""


class Course(NamedTuple):
    """Where a relay is, and where it leads."""

    ticket: Ticket
    at: int
    stages: tuple[ReferenceId, ...]
    method: str

    @property
    def here(self) -> ReferenceId:
        return self.stages[self.at]

    @property
    def last(self) -> int:
        return self.stages[-1].owner

    @property
    def is_through(self) -> bool:
        """The stage is the last one."""
        return self.at == len(self.stages) - 1

    def write(self) -> bytes:
        head = _HEAD.pack(*self.ticket, self.at, len(self.stages))
        return b"".join((head, *[_STAGE.pack(*each) for each in self.stages], self.method.encode()))


def read_course(data: bytes) -> Course:
    """What `Course.write` wrote. Raises `ValueError` if it is none."""
    try:
        driver, number, at, count = _HEAD.unpack_from(data)
        places = range(_HEAD.size, _HEAD.size + count * _STAGE.size, _STAGE.size)
        stages = tuple([ReferenceId(*_STAGE.unpack_from(data, place)) for place in places])
    except struct.error:
        raise ValueError("a relay that does not say where it leads") from None
    if at >= count:
        raise ValueError("a relay that is at none of its stages")
    method = data[_HEAD.size + count * _STAGE.size :].decode()
    return Course((driver, number), at, stages, method)


class _Expected(NamedTuple):
    """What the last worker keeps: the workers on the way, and how to answer the driver."""

    workers: frozenset[int]
    finish: Finish


class Relays:
    """The relays of one worker: those that it drives, passes on and brings to their end."""

    def __init__(self, node: Node, call_method: Callable[[ReferenceId, str, Any], object]) -> None:
        """`call_method` runs a method of a value here."""
        self._node = node
        self._call_method = call_method
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._driven: dict[int, tuple[Course, Pending]] = {}
        self._expected: dict[Ticket, _Expected] = {}
        self._early: dict[Ticket, Callable[[Finish], None]] = {}
        """What is to be done when the call comes that expects it."""
        node.on_operation(EXPECT, self._expect)
        node.on_operation(PASS_ON, self._on_call)
        node.on_post(PASS_ON, self._on_pass_on)
        node.on_post(FAILED, self._on_failed)
        node.on_post(OVER, self._on_over)
        node.on_lost(self._on_lost)

    def counts(self) -> int:
        """How many relays are kept here in whatever way."""
        return len(self._driven) + len(self._expected) + len(self._early)

    # The driver.

    def run(
        self,
        stages: Sequence[ReferenceId],
        method: str,
        tensor: Tensor,
        timeout: float | None,
        name: str,
    ) -> Any:
        """Pass a tensor through the method of all stages; what the last one returns.

        None of the stages is on this worker. Whoever calls keeps the references to them meanwhile.
        `name` is what errors call it.
        """
        node = self._node
        course = Course((node.info.id, next(self._numbers)), 0, tuple(stages), method)
        for stage in stages:
            if node.is_lost(stage.owner):
                raise node.loss_of(stage.owner)
        data = course.write()
        leaving: list[Callable[[], None]] = []
        last = node.members.member(course.last).info
        expects = Parcel(EXPECT, data, ())
        pending = node.call(last, EXPECT, (), None, timeout, None, expects, leaving)
        pending.target = name
        number = course.ticket[1]
        self._driven[number] = course, pending
        try:
            try:
                first = course.here.owner
                node.post(first, PASS_ON, Parcel(PASS_ON, data, (tensor,)), node.crossing.current())
            except BaseException:
                node.drop(pending)
                node.never_left(pending)
                raise
            for leave in leaving:
                leave()
            # A loss before the entry was made was told to nobody.
            for stage in stages:
                if node.is_lost(stage.owner):
                    self._fail(course, pending, node.loss_of(stage.owner))
            return node.wait(pending)
        finally:
            del self._driven[number]

    def _fail(self, course: Course, pending: Pending, error: Any) -> None:
        """The driver's call will not be answered as it should."""
        node = self._node
        if node.calls.take(pending.callee.id, pending.call_id) is not None:
            pending.settle(None, error)
            pending.complete()
        node.post(course.last, OVER, course.write())

    def _on_failed(self, sender: int, payload: Any) -> None:
        """A stage could not do its part."""
        data, told = payload
        course = read_course(data)
        if course.ticket[0] != self._node.info.id:
            raise ValueError("a relay of another worker failed")
        driven = self._driven.get(course.ticket[1])
        if driven is not None:
            self._fail(*driven, rebuild_error(told_error(told), self._node.trust))
        else:
            self._node.post(course.last, OVER, data)

    # A stage.

    def _on_pass_on(self, sender: int, parcel: Any) -> None:
        """The tensor is here: run this stage."""
        if type(parcel) is not Parcel or len(parcel.tensors) != 1:
            raise ValueError("a relay that brings no tensor")
        self._arrived(read_course(parcel.data), parcel.tensors[0])

    def _on_call(self, sender: int, data: Any, value: Any) -> None:
        """As `_on_pass_on`, for what is not a tensor alone: it may be that it cannot be read here,
        and that is told to who sends it."""
        self._arrived(read_course(data), value)

    def _arrived(self, course: Course, value: Any) -> None:
        self._refuse_if_data_only()
        scope = self._node.crossing.current()
        if not course.is_through:
            self._run(course, value, partial(self._pass_on, course, scope))
            return

        def arrive(finish: Finish) -> None:
            self._within(scope, lambda: self._run(course, value, finish))

        with self._lock:
            expected = self._expected.pop(course.ticket, None)
            if expected is None:
                self._early[course.ticket] = arrive
                return
        self._run(course, value, expected.finish)

    def _refuse_if_data_only(self) -> None:
        if self._node.data_only:
            raise Refused(f"worker {self._node.info.name!r} takes data only and passes none on")

    def _within(self, scope: Any, work: Callable[[], None]) -> None:
        if scope is None:
            work()
        else:
            with self._node.crossing.enter(self._node, scope):
                work()

    def _run(self, course: Course, value: Any, finish: Finish) -> None:
        """Run the stage and hand on what it returns."""
        try:
            result = self._call_method(course.here, course.method, (value,))
        except BaseException as error:
            finish(None, error)
            return
        if type(result) is Later:
            result.subscribe(finish)
        else:
            finish(result, None)

    def _pass_on(
        self, course: Course, scope: Any, value: object, error: BaseException | None
    ) -> None:
        try:
            if error is not None:
                raise error
            onward = course._replace(at=course.at + 1)
            if type(value) is Tensor and onward.here.owner != self._node.info.id:
                self._post(onward, value, scope)
            else:
                self._within(scope, lambda: self._call(onward, value))
        except BaseException as problem:
            self._tell_failure(course, problem)

    def _post(self, onward: Course, tensor: Tensor, scope: Any) -> None:
        node, to = self._node, onward.here.owner
        if node.is_lost(to):
            raise node.loss_of(to)
        node.post(to, PASS_ON, Parcel(PASS_ON, onward.write(), (tensor,)), scope)

    def _call(self, onward: Course, value: object) -> None:
        """Pass on what is not a tensor alone, or goes to this worker itself."""
        node = self._node
        to = node.members.member(onward.here.owner).info
        told = partial(self._passed_on, onward)
        node.call(to, PASS_ON, (onward.write(), value), None, 0, told)

    def _passed_on(self, course: Course, pending: Pending) -> None:
        try:
            self._node.outcome(pending)
        except BaseException as error:
            self._tell_failure(course, error)

    def _tell_failure(self, course: Course, error: BaseException) -> None:
        node = self._node
        told = describe_error(node.info.name, error, node.trust)
        node.post(course.ticket[0], FAILED, (course.write(), told))

    # The last worker.

    def _expect(self, sender: int, parcel: Any) -> Later:
        self._refuse_if_data_only()
        course = read_course(parcel.data)
        if course.ticket[0] != sender:
            raise ValueError("a relay is expected by its driver only")
        workers = frozenset(stage.owner for stage in course.stages) - {self._node.info.id}

        def subscribe(finish: Finish) -> None:
            with self._lock:
                arrive = self._early.pop(course.ticket, None)
                if arrive is None:
                    self._expected[course.ticket] = _Expected(workers, finish)
            if arrive is not None:
                arrive(finish)

        return Later(subscribe)

    def _on_over(self, sender: int, data: Any) -> None:
        """Nothing will come for a relay; its driver knows."""
        ticket = read_course(data).ticket
        if ticket[0] != sender:
            raise ValueError("whether a relay is over is for its driver to say")
        with self._lock:
            expected = self._expected.pop(ticket, None)
            self._early.pop(ticket, None)
        if expected is not None:
            expected.finish(None, TelegradError("The relay has failed before it came here."))

    def _on_lost(self, worker: int, reason: str) -> None:
        for course, pending in list(self._driven.values()):
            if any(stage.owner == worker for stage in course.stages):
                self._fail(course, pending, self._node.loss_of(worker))
        with self._lock:
            gone = [
                ticket
                for ticket, expected in self._expected.items()
                if worker == ticket[0] or worker in expected.workers
            ]
            lost = [self._expected.pop(ticket) for ticket in gone]
            for ticket in [ticket for ticket in self._early if ticket[0] == worker]:
                del self._early[ticket]
        for expected in lost:
            expected.finish(None, self._node.loss_of(worker))
