"""The transport of a simulated worker.

Requests are begun as in production: in the order in which they came over their link, one after the
other. The activity that serves a link lets the next request begin before it waits, and at times
when it does not, as production does for a request that takes long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, cast

from telegrad.rpc.calls import Pending, describe_target
from telegrad.rpc.crossing import Scope
from telegrad.rpc.node import Node
from telegrad.rpc.transport import Reply
from telegrad.testing.network import End, Network, Port
from telegrad.testing.scheduler import Activity, Place, Scheduler, current_activity
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame, Kind

TAKES_LONG = 0.1


class SimulatedNode(Node):
    """A node that lets the trace know the topics of its posts."""

    def post(self, to: int, topic: str, payload: object, scope: Scope | None = None) -> None:
        me = current_activity()
        if me is not None:
            me.topic = topic
        super().post(to, topic, payload, scope)


class _Latch:
    """Stands where threads put a lock: wakes the activities that wait for a call."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.waiting: list[Activity] = []

    def locked(self) -> bool:
        return bool(self.waiting)

    def release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for activity in waiting:
            self._scheduler.wake(activity)


class SimulatedTransport:
    """How a simulated worker sends, waits and serves."""

    def __init__(
        self, scheduler: Scheduler, network: Network, worker: Place, node: SimulatedNode
    ) -> None:
        self._scheduler = scheduler
        self._network = network
        self._worker = worker
        self._node = node
        self._id = node.info.id
        self._ended: set[int] = set()
        self._burying = False
        self._requests: dict[tuple[int, int], str] = {}
        """The calls that are to be answered, as the trace names them."""
        self.on_lose: Callable[[int], None] = lambda worker: None
        """Told when this worker is done with another one."""
        network.ports[self._id] = Port(node.info, self._received, self.accepts_from)

    # Sending.

    def call(self, pending: Pending, packed: Packed, note: bytes) -> None:
        label = f"call {pending.call_id} {describe_target(pending.target)}"
        self._scheduler.check_alive()
        end = self._network.link(self._id, pending.callee.id).caller_end
        end.send(Kind.CALL, pending.call_id, note, packed, label)
        self._scheduler.at(
            pending.deadline, lambda: self._expire(pending), lambda: not pending.done
        )
        self._scheduler.pause()

    def post(self, to: int, packed: Packed, note: bytes) -> None:
        self._scheduler.check_alive()
        me = current_activity()
        label = f"post {me.topic if me is not None else ''}"
        end = self._network.link(self._id, to).caller_end
        end.send(Kind.POST, 0, note, packed, label)
        self._scheduler.pause()

    def reply(self, to: int, call_id: int, reply: Reply) -> None:
        # Futures answer from the callbacks of torch.
        if to in self._ended or self._worker.dead or self._scheduler.ending:
            return
        end = self._network.link(to, self._id).callee_end
        request = self._requests.pop((to, call_id), f"call {call_id}")
        label = f"{reply.kind.name.lower()} to {request}"
        end.send(reply.kind, call_id, reply.note, reply.packed, label)
        self._scheduler.pause_unharmed()

    # Waiting.

    def wait(self, pending: Pending, until: float = math.inf) -> None:
        while not pending.done and self._scheduler.now < until:
            latch = cast(Any, pending.latch)
            if latch is None:
                latch = _Latch(self._scheduler)
                pending.latch = cast(Lock, latch)
            me = current_activity()
            if me is not None:
                latch.waiting.append(me)
            timeout = None if until == math.inf else until - self._scheduler.now
            self._scheduler.wait(lambda: f"call {pending.call_id}, {pending.describe()}", timeout)

    def attend(self, pending: Pending) -> None:
        """Replies settle their calls whether anyone waits or not."""

    def blocking(self) -> None:
        me = current_activity()
        if me is not None and me.let_go is not None:
            me.let_go()

    def starting(self, function: object) -> None:
        self._scheduler.pause()

    def knows(self, worker: int) -> bool:
        return True

    def nudge(self) -> None:
        # This may run inside of a garbage collection, on any thread: it only leaves a note.
        if not (self._burying or self._worker.dead or self._scheduler.ending):
            self._burying = True
            self._scheduler.at(self._scheduler.now, self._bury)

    def _bury(self) -> None:
        self._burying = False
        name = f"{self._worker.name}: release of references"
        self._scheduler.spawn(name, self._worker, self._node.values.bury)

    def _expire(self, pending: Pending) -> None:
        if self._worker.dead:
            return
        self._scheduler.record("times out", self._worker.name, f"call {pending.call_id}")
        if self._node.calls.expire_one(pending):
            self._complete([pending])

    def _complete(self, settled: Iterable[Pending]) -> None:
        for pending in settled:
            if pending.completion:
                name = f"{self._worker.name}: completion of call {pending.call_id}"
                self._scheduler.spawn(name, self._worker, pending.complete)

    # Receiving.

    def accepts_from(self, worker: int) -> bool:
        return worker not in self._ended

    def _received(self, end: End, frame: Frame, label: str) -> None:
        if frame.kind in (Kind.CALL, Kind.POST):
            self._request(end, frame, label)
        else:
            self._answer(end.other, frame)

    def _answer(self, callee: int, frame: Frame) -> None:
        pending = self._node.calls.take(callee, frame.call_id)
        if pending is None:
            name = f"{self._worker.name}: late reply to call {frame.call_id}"
            self._scheduler.spawn(name, self._worker, lambda: self._node.discard(callee, frame))
        else:
            pending.settle(frame)
            self._complete([pending])

    def _request(self, end: End, frame: Frame, label: str) -> None:
        end.requests.append((frame, label))
        if frame.kind == Kind.CALL:
            self._requests[end.other, frame.call_id] = label
        if end.leader is None or self._scheduler.random.random() < TAKES_LONG:
            self._lead(end)

    def _lead(self, end: End) -> None:
        sender = self._node.members.name(end.other)
        name = f"{self._worker.name}: request {end.requests[0][1]} of {sender}"
        end.leader = self._scheduler.spawn(name, self._worker, lambda: self._serve_link(end))

    def _serve_link(self, end: End) -> None:
        me = current_activity()
        assert me is not None

        def let_go() -> None:
            me.let_go = None
            end.leader = None
            if end.requests:
                self._lead(end)

        while end.leader is me and end.requests:
            frame, _ = end.requests.popleft()
            me.let_go = let_go
            reply = self._node.serve(end.other, frame)
            if reply is not None:
                self.reply(end.other, frame.call_id, reply)
        if end.leader is me:
            end.leader = None

    # Losing others.

    def told_of_loss(self, sender: int, worker: int) -> None:
        self.lose(worker, f"worker {self._node.members.name(sender)!r} reports that it is gone")

    def lose(self, worker: int, reason: str) -> None:
        if worker in self._ended or worker == self._id:
            return
        self._ended.add(worker)
        self._scheduler.record("loses", self._worker.name, f"{self._node.members.name(worker)}")
        failed = self._node.worker_lost(worker, reason)
        self._complete(failed)
        self.on_lose(worker)
