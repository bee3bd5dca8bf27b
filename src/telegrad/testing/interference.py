"""Faults in real jobs: messages of a running worker that are lost or late.

    with interfere(Lose("remote"), Delay("call", 1.5)):
        ...

The simulator tries every order and every loss in one process; this is for tests that need the real
sockets and threads. It touches what this worker sends, and ends with the block.

What it means that a message is lost depends on who would miss it. A call or a `to_here` ends at
once with `MessageLost`: its caller has to cope. Telegrad's own messages (kind `"own"`: reference
counts, gradients, releases) are promised to arrive while both workers live, so it is the connection
that is lost under them: it breaks as the message leaves and has to mend, and the message must take
effect once.

A worker that is interfered with changes the class of its node and its agent, and changes it back.
So a worker that is not, pays nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from telegrad.rpc.agent import Agent
from telegrad.rpc.arguments import check_whole
from telegrad.rpc.calls import Late, Pending, describe_target
from telegrad.rpc.crossing import Scope
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import TelegradError, WorkerLost
from telegrad.rpc.node import Node
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.codec import Packed
from telegrad.wire.parcel import Parcel

KINDS = ("call", "remote", "fetch", "method", "own")
_SERVICE = "interference"
_OPERATIONS = {"create": "remote", "fill": "remote", "fetch": "fetch", "invoke": "method"}


class MessageLost(TelegradError):
    """A message was lost because the test wanted it."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is about to leave this worker.

    kind       "call" (`rpc_sync`, `rpc_async`), "remote", "fetch" (`to_here`), "method" (a call of
               a method through a reference), or "own", a message of telegrad's own
    worker     the name of the worker that it goes to
    subject    the function that is called, the name of the method, or the topic of an own message
    """

    kind: str
    worker: str
    subject: Any

    def __str__(self) -> str:
        return f"{self.kind} {describe_target(self.subject)} to worker {self.worker!r}"


Which = str | Callable[[Message], bool]


@dataclass(frozen=True, slots=True)
class Lose:
    """The first `times` messages of a kind, or that a function chooses, are lost. None: all."""

    which: Which
    times: int | None = None

    def __post_init__(self) -> None:
        _check(self.which)
        if self.times is not None:
            check_whole("times", self.times, least=1)


@dataclass(frozen=True, slots=True)
class Delay:
    """Each message of a kind, or that a function chooses, leaves so many seconds late."""

    which: Which
    seconds: float

    def __post_init__(self) -> None:
        _check(self.which)
        is_number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not is_number or not 0 <= self.seconds < math.inf:
            raise ValueError(f"A message cannot be {self.seconds!r} seconds late.")


def _check(which: Which) -> None:
    if not callable(which) and which not in KINDS:
        raise ValueError(f"{which!r} is no kind of message: there are {', '.join(KINDS)}.")


class Interference:
    """The rules that hold for what one worker sends."""

    def __init__(self, *rules: Lose | Delay) -> None:
        self._rules = rules
        self._struck = [0] * len(rules)
        self._lock = threading.Lock()

    def begin(self, node: Node) -> None:
        if type(node) is not Node or type(node.transport) is not Agent:
            raise RuntimeError(
                f"Worker {node.info.name!r} is interfered with already, or simulated: begin with "
                "all rules at once, and use telegrad.testing.Faults in simulations."
            )
        node.services[_SERVICE] = self
        node.transport.__class__ = _LateAgent
        node.__class__ = _TroubledNode

    def end(self, node: Node) -> None:
        node.__class__ = Node
        node.transport.__class__ = Agent
        del node.services[_SERVICE]

    def loses(self, message: Message) -> bool:
        with self._lock:
            for index, rule in enumerate(self._rules):
                if not isinstance(rule, Lose) or not _concerns(rule.which, message):
                    continue
                if rule.times is None or self._struck[index] < rule.times:
                    self._struck[index] += 1
                    return True
        return False

    def delay(self, message: Message) -> float:
        """By how many seconds the message leaves late."""
        delays = [rule for rule in self._rules if isinstance(rule, Delay)]
        return max((rule.seconds for rule in delays if _concerns(rule.which, message)), default=0.0)


def _concerns(which: Which, message: Message) -> bool:
    return which == message.kind if isinstance(which, str) else which(message)


@contextmanager
def interfere(*rules: Lose | Delay) -> Iterator[None]:
    """While the block runs, these rules hold for what this worker sends.

    >>> with interfere(Lose("call", times=1)):                       # doctest: +SKIP
    ...     rpc.rpc_sync("b", torch.add, args=(x, y))
    Traceback (most recent call last):
    telegrad.testing.MessageLost: ...
    """
    node = current_node()
    interference = Interference(*rules)
    interference.begin(node)
    try:
        yield
    finally:
        interference.end(node)


class _Leaving(threading.local):
    """By how much the message that the calling thread sends is late."""

    delay = 0.0

    @contextmanager
    def by(self, delay: float) -> Iterator[None]:
        # What is packed may make calls of its own.
        before, self.delay = self.delay, delay
        try:
            yield
        finally:
            self.delay = before


_leaving = _Leaving()


class _TroubledNode(Node):
    """Knows what each message is for, and so which rules concern it."""

    def call(
        self,
        to: WorkerInfo,
        target: object,
        args: tuple[object, ...] | list[object],
        kwargs: dict[str, object] | None,
        timeout: float | None = None,
        on_settled: Callable[[Pending], None] | None = None,
        written: Packed | Parcel | None = None,
        leaving: list[Callable[[], None]] | None = None,
        on_late: Late | None = None,
    ) -> Pending:
        # None of them waits for others to leave with: each is late by itself.
        message = _describe(to, target, args)
        rest = (timeout, on_settled, written, None, on_late)
        if message is None:
            return super().call(to, target, args, kwargs, *rest)
        interference: Interference = self.services[_SERVICE]
        if interference.loses(message):
            return self._lose(to, target, message, on_settled)
        with _leaving.by(interference.delay(message)):
            return super().call(to, target, args, kwargs, *rest)

    def _lose(
        self,
        to: WorkerInfo,
        target: object,
        message: Message,
        on_settled: Callable[[Pending], None] | None,
    ) -> Pending:
        pending = self.calls.begin(to, target, 0, self.runtime.now())
        self.calls.take(to.id, pending.call_id)
        pending.settle(None, MessageLost(f"The message was lost, as the test wants it: {message}."))
        if on_settled is not None:
            on_settled(pending)
        return pending

    def post(self, to: int, topic: str, payload: object, scope: Scope | None = None) -> None:
        interference: Interference = self.services[_SERVICE]
        message = Message("own", self.members.name(to), topic)
        with _leaving.by(interference.delay(message)):
            super().post(to, topic, payload, scope)
        if interference.loses(message):
            assert isinstance(self.transport, Agent)
            self.transport.sever(to)


class _LateAgent(Agent):
    """Holds messages back. A call that times out meanwhile leaves all the same, as on a network."""

    def call(self, pending: Pending, packed: Packed, note: bytes) -> None:
        if not _leaving.delay:
            super().call(pending, packed, note)
            return
        self._later(partial(_call_late, self, pending, _copied(packed), note))
        self.node.calls.look_by(pending.deadline)
        self.watch.poke()

    def post(self, to: int, packed: Packed, note: bytes) -> None:
        if not _leaving.delay:
            super().post(to, packed, note)
            return
        self._later(partial(super().post, to, _copied(packed), note))

    def _later(self, send: Callable[[], object]) -> None:
        self.node.runtime.call_later(_leaving.delay, send)


def _call_late(agent: Agent, pending: Pending, packed: Packed, note: bytes) -> None:
    if not agent.knows(pending.callee.id):
        # By itself a call does not leave if its time is over before its worker was met.
        with suppress(WorkerLost):
            agent._reach(pending.callee.id)
    Agent.call(agent, pending, packed, note)
    # Who waits for it may have begun before there was a link to read.
    agent.attend(pending)


def _describe(
    to: WorkerInfo, target: object, args: tuple[object, ...] | list[object]
) -> Message | None:
    """None for what belongs to the working of the job itself, such as its end."""
    if not isinstance(target, str):
        return Message("call", to.name, target)
    kind = _OPERATIONS.get(target)
    if kind is None:
        return None
    # All these operations name a reference first, and then what is to be done with it.
    return Message(kind, to.name, args[1] if len(args) > 1 else "to_here")


def _copied(packed: Packed) -> Packed:
    """What leaves later must not change with the caller's tensors."""
    buffers = [memoryview(bytearray(buffer)) for buffer in packed.buffers]
    return Packed(packed.meta, [], buffers)
