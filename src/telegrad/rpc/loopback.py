"""Calls of a worker to itself: through the codec like all others, but a queue is their socket.

They are served as `Incoming` serves: one thread takes a request from the queue and runs it, and
another takes over when the request waits or takes long. So posts to oneself are begun in order too.
"""

from __future__ import annotations

import math
import queue
import threading
from typing import TYPE_CHECKING

from telegrad.rpc.calls import Pending
from telegrad.rpc.transport import Reply
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.interrupts import await_latch

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent


class Loopback:
    """Both ends of a worker's link to itself."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._leader: object | None = None
        self._turn = 0
        self._seen_turn = 0

    @property
    def runs(self) -> bool:
        """Whether the one that leads runs a request."""
        return bool(self._turn & 1)

    def call(self, pending: Pending, packed: Packed, note: bytes) -> None:
        self._put(_frame(Kind.CALL, pending.call_id, packed, note))

    def post(self, packed: Packed, note: bytes) -> None:
        self._put(_frame(Kind.POST, 0, packed, note))

    def _put(self, frame: Frame) -> None:
        self._frames.put(frame)
        with self._lock:
            if self._leader is not None:
                return
            me = self._leader = object()
        self._agent.threads.run(lambda: self._lead(me))

    def _lead(self, me: object) -> None:
        agent = self._agent
        while True:
            with self._lock:
                if self._leader is not me:
                    return
                try:
                    frame = self._frames.get_nowait()
                except queue.Empty:
                    self._leader = None
                    return
                self._turn += 1
            if agent.watch.idle:
                self._seen_turn = self._turn
                agent.watch.set_alarm()
            agent.local.incoming, agent.local.token = self, me
            try:
                reply = agent.node.serve(agent.node.info.id, frame)
            finally:
                agent.local.incoming = None
            if reply is not None:
                self.reply(frame.call_id, reply)
            with self._lock:
                if self._leader is me:
                    self._turn += 1

    def reply(self, call_id: int, reply: Reply) -> None:
        node = self._agent.node
        frame = _frame(reply.kind, call_id, reply.packed, reply.note)
        pending = node.calls.take(node.info.id, call_id)
        if pending is None:
            node.discard(node.info.id, frame)
            return
        pending.settle(frame)
        if pending.completion:
            self._agent.complete_elsewhere([pending])

    def wait(self, pending: Pending, until: float = math.inf) -> None:
        latch = pending.make_latch()
        while not pending.done:
            now = self._agent.node.runtime.now()
            if pending.deadline <= now:
                self._agent.node.calls.expire_one(pending)
            elif until <= now:
                return
            else:
                ends = min(pending.deadline, until, now + 3600.0)
                try:
                    await_latch(latch, ends - now)
                except BaseException:
                    if pending.done:
                        pending.wake()
                    raise
        pending.wake()

    def attend(self) -> None:
        """Replies complete their futures without anyone reading."""

    def about_to_block(self, token: object) -> None:
        self._hand_over(token)

    def about_to_run(self, token: object, function: object) -> None:
        if self._agent.slow_functions.expects(function):
            self._hand_over(token)

    def _hand_over(self, token: object | None, turn: int | None = None) -> None:
        with self._lock:
            if token is None or self._leader is not token:
                return
            if turn is not None and turn != self._turn:
                return
            self._turn += 1
            me = self._leader = object()
        self._agent.threads.run(lambda: self._lead(me))

    def tick(self) -> bool:
        turn = self._turn
        running = bool(turn & 1)
        if running and turn == self._seen_turn:
            self._hand_over(self._leader, turn)
        self._seen_turn = turn
        return running

    def end(self) -> None:
        """Nothing is open."""


def _frame(kind: Kind, call_id: int, packed: Packed, note: bytes) -> Frame:
    return Frame(kind, call_id, note, packed.meta, [bytearray(buffer) for buffer in packed.buffers])
