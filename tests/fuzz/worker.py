"""A worker without threads or sockets, to which a hostile member of its job says what it likes.

It is the node of production with all its layers: codec, calls, references, autograd. It takes data
only. Whatever comes, it answers or is silent; it raises nothing and waits for nothing.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from typing import Any

import torch

import telegrad
from telegrad.rpc.current import set_thread_node
from telegrad.rpc.limits import Limits
from telegrad.rpc.members import Member, Members
from telegrad.rpc.node import Node
from telegrad.rpc.transport import Reply
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.codec import Trust
from telegrad.wire.frames import Frame, Kind

ME, PEER, OTHER = WorkerInfo("me", 0), WorkerInfo("peer", 1), WorkerInfo("other", 2)
LIMITS = Limits(
    metadata_bytes=1 << 16, nesting=50, items=1 << 12, tensors=1 << 8, calls_in_flight=8
)
WEIGHT = torch.ones(3, requires_grad=True)


class Blocked(Exception):
    """The worker would wait for what only another message could bring."""


class _Condition(threading.Condition):
    def __init__(self) -> None:
        self.guard = threading.RLock()
        super().__init__(self.guard)

    def wait(self, timeout: float | None = None) -> bool:
        raise Blocked


class _Runtime:
    def now(self) -> float:
        return 0.0

    def spawn(self, work: Callable[[], object]) -> None:
        work()

    def condition(self) -> _Condition:
        return _Condition()

    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]:
        return lambda: None


class _Transport:
    """What leaves is dropped."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def call(self, pending: Any, packed: Any, note: bytes) -> None: ...
    def reply(self, to: int, call_id: int, reply: Reply) -> None: ...
    def post(self, to: int, packed: Any, note: bytes) -> None: ...
    def wait(self, pending: Any) -> None:
        raise Blocked

    def attend(self, pending: Any) -> None: ...
    def starting(self, function: object) -> None: ...
    def blocking(self) -> None: ...
    def knows(self, worker: int) -> bool:
        return True

    def nudge(self) -> None: ...
    def lose(self, worker: int, reason: str) -> None:
        self._node.worker_lost(worker, reason)


@telegrad.export
def weigh(x: torch.Tensor) -> torch.Tensor:
    return (x * WEIGHT).sum()


@telegrad.export
def give_back(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def new_worker() -> Node:
    """A worker with a value that others know, and a context in which a tensor has left."""
    members = Members([Member(info, 1) for info in (ME, PEER, OTHER)])
    node = Node(ME, members, _Runtime(), trust=Trust.DATA, limits=LIMITS)
    node.transport = _Transport(node)  # type: ignore[assignment]
    service = node.services["autograd"]
    context = service.new_context()
    tensor = (WEIGHT * 2).requires_grad_()
    node.crossing.leaving(node, PEER.id, [tensor], context.recording)
    return node


KINDS = (Kind.CALL, Kind.POST, Kind.REPLY)


def serve(data: bytes) -> None:
    """A kind, the length of a note, the note, and metadata; up to three such frames."""
    node = new_worker()
    set_thread_node(node)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            for frame in frames_of(data):
                _say(node, frame)
    finally:
        node.closed = True
        set_thread_node(None)


def _say(node: Node, frame: Frame) -> None:
    if frame.kind == Kind.REPLY:
        node.discard(PEER.id, frame)
        return
    with contextlib.suppress(Blocked):
        reply = node.serve(PEER.id, frame)
        assert reply is None or isinstance(reply, Reply)
    node.values.bury()


def frames_of(data: bytes) -> list[Frame]:
    frames: list[Frame] = []
    while len(data) >= 4 and len(frames) < 3:
        kind, note = KINDS[data[0] % 3], data[1]
        meta = int.from_bytes(data[2:4], "little")
        body = data[4:]
        frames.append(Frame(kind, 1, body[:note], body[note : note + meta], []))
        data = body[note + meta :]
    return frames


def frame_bytes(kind: Kind, note: bytes, meta: bytes) -> bytes:
    """The inverse, for the corpus."""
    head = bytes([KINDS.index(kind), len(note)]) + len(meta).to_bytes(2, "little")
    return head + note + meta
