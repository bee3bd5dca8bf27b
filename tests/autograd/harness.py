"""Several workers in one thread: messages are delivered in an order drawn from a seed.

Each worker has the real autograd layer over a node that is only a mailbox. Where the real node
would wait, this one delivers messages: to itself only when the wait is inside the engine (the
others must not run there), to anyone when it is the caller of `backward` who waits. An engine call
that finds no message for it in a draw gives up and is suspended, so both ways are taken often.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.context import Context, working_in
from telegrad.autograd.crossing import AutogradCrossing
from telegrad.autograd.messages import Mode, Options, kind_of
from telegrad.autograd.nodes import engine_thread
from telegrad.autograd.service import Autograd
from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import WorkerLost
from telegrad.rpc.limits import Ledger, Limits
from telegrad.rpc.results import Later
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.parcel import Parcel

CROSSING = AutogradCrossing()


class Stuck(AssertionError):
    """Someone waits and no message is under way."""


class Network:
    """Messages under way. In order for each pair of workers, or in any order."""

    def __init__(self, rng: random.Random, *, in_order: bool, engine_waits: float) -> None:
        self.rng = rng
        self.in_order = in_order
        self.engine_waits = engine_waits
        self.nodes: dict[int, Mailbox] = {}
        self.under_way: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.sent: dict[str, int] = {}

    def send(self, sender: int, to: int, delivery: Callable[[], None], kind: str) -> None:
        self.under_way.setdefault((sender, to), []).append(delivery)
        self.sent[kind] = self.sent.get(kind, 0) + 1

    def deliver_one(self, to: int | None = None) -> bool:
        pairs = [p for p, q in self.under_way.items() if q and (to is None or p[1] == to)]
        if not pairs:
            return False
        queue = self.under_way[self.rng.choice(sorted(pairs))]
        queue.pop(0 if self.in_order else self.rng.randrange(len(queue)))()
        return True

    def drain(self) -> None:
        while self.deliver_one():
            pass

    def drop_of(self, worker: int) -> None:
        for pair in list(self.under_way):
            if worker in pair:
                del self.under_way[pair]


class DrawnCondition:
    """A condition on which waiting means delivering messages."""

    def __init__(self, node: Mailbox) -> None:
        self._node = node

    def __enter__(self) -> object:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def notify_all(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> bool:
        network, node = self._node.network, self._node
        if engine_thread.running is not None:
            if network.rng.random() < network.engine_waits and network.deliver_one(node.info.id):
                return True
        elif network.deliver_one():
            return True
        if timeout is None:
            raise Stuck("a worker waits for ever")
        node.clock += timeout
        return False


class Mailbox:
    """As much of a node as autograd needs."""

    def __init__(self, worker: int, network: Network) -> None:
        self.info = WorkerInfo(f"worker{worker}", worker)
        self.data_only = False
        self.limits = Limits()
        self.network = network
        self.members = self
        self.runtime = self
        self.transport = self
        self.services: dict[str, Any] = {}
        self.clock = 0.0
        self._topics: dict[str, Callable[[int, Any], None]] = {}
        self._operations: dict[str, Callable[..., Any]] = {}
        self._asked: list[Pending] = []
        self._lost_callbacks: list[Callable[[int, str], None]] = []
        self._lost: dict[int, str] = {}
        network.nodes[worker] = self
        self.services["autograd"] = Autograd(self)

    @property
    def autograd(self) -> Autograd:
        service: Autograd = self.services["autograd"]
        return service

    def name(self, worker: int) -> str:
        return f"worker{worker}"

    def ledger(self, kind: str) -> Ledger:
        return Ledger(kind, getattr(Limits(), kind), self.info.name, self.name)

    def now(self) -> float:
        return self.clock

    def condition(self) -> DrawnCondition:
        return DrawnCondition(self)

    def blocking(self) -> None:
        return None

    def call_later(self, delay: float, work: Callable[[], None]) -> Callable[[], None]:
        self.network.send(self.info.id, self.info.id, work, "timer")
        return lambda: None

    def on_post(self, topic: str, handler: Callable[[int, Any], None]) -> None:
        self._topics[topic] = handler

    def on_operation(self, name: str, handler: Callable[..., object]) -> None:
        self._operations[name] = handler

    def on_lost(self, callback: Callable[[int, str], None]) -> None:
        self._lost_callbacks.append(callback)

    def on_closed(self, callback: Callable[[], None]) -> None:
        self.close = callback

    def on_unread(self, callback: Callable[[int, Any, str], None]) -> None:
        """Nothing is refused here."""

    def lost_workers(self) -> dict[int, str]:
        return self._lost

    @property
    def has_losses(self) -> bool:
        return bool(self._lost)

    def is_lost(self, worker: int) -> bool:
        return worker in self._lost

    def lose(self, worker: int) -> None:
        self._lost[worker] = "it was killed"
        for pending in self._asked:
            if pending.callee.id == worker and not pending.done:
                pending.settle(None, WorkerLost("it was killed"))
                pending.complete()
        for callback in self._lost_callbacks:
            callback(worker, "it was killed")

    def post(self, to: int, topic: str, payload: Any, scope: Any = None) -> None:
        if to in self._lost:
            return
        receiver = self.network.nodes[to]
        kind = topic if topic != "autograd.pass" else kind_of(payload)
        self._send(
            to, payload, scope, kind, lambda given, _: receiver._topics[topic](self.info.id, given)
        )

    def _send(
        self,
        to: int,
        payload: Any,
        scope: Any,
        kind: str,
        receive: Callable[[Any, Any], None],
    ) -> None:
        tensors: list[Tensor] = []
        _tensors_of(payload, tensors)
        note = CROSSING.leaving(self, to, tensors, scope) if scope is not None else b""
        copies = [tensor.detach().clone() for tensor in tensors]

        def deliver() -> None:
            receiver = self.network.nodes[to]
            arrived, entered = CROSSING.arriving(receiver, self.info.id, note, copies)
            given = _replaced(payload, dict(zip(map(id, tensors), arrived, strict=True)))
            if entered is None:
                receive(given, None)
            else:
                with CROSSING.enter(receiver, entered):
                    receive(given, entered)

        self.network.send(self.info.id, to, deliver, kind)

    # Calls of operations.

    def ask(self, to: int, operation: str, payload: Any, scope: Any) -> Pending:
        receiver = self.network.nodes[to]
        pending = Pending(len(self._asked), receiver.info, operation, 0, math.inf)
        self._asked.append(pending)

        def settle(answer: Any, _: Any) -> None:
            if not pending.done:
                pending.settle((answer,))  # type: ignore[arg-type]
                pending.complete()

        def run(given: Any, entered: Any) -> None:
            def finish(answer: Any, error: BaseException | None) -> None:
                assert error is None
                kind = "empty answer" if answer is None else kind_of(answer)
                receiver._send(self.info.id, answer, entered, kind, settle)

            result = receiver._operations[operation](self.info.id, given)
            if type(result) is Later:
                result.subscribe(finish)
            else:
                finish(result, None)

        self._send(to, payload, scope, kind_of(payload), run)
        return pending

    def wait(self, pending: Pending, until: float) -> None:
        while not pending.done and self.clock < until:
            if not self.network.deliver_one():
                if until == math.inf:
                    raise Stuck("an answer never comes")
                self.clock = until

    def when_settled(self, pending: Pending, work: Callable[[], None]) -> None:
        pending.completion.append(work)
        if pending.done:
            pending.complete()

    def drop(self, pending: Pending) -> None:
        if not pending.done:
            pending.completion.clear()
            pending.settle(None)

    def outcome(self, pending: Pending) -> Any:
        if pending.error is not None:
            raise pending.error
        assert pending.frame is not None
        return pending.frame[0]


def _tensors_of(payload: Any, found: list[Tensor]) -> None:
    if isinstance(payload, Tensor):
        if not any(payload is tensor for tensor in found):
            found.append(payload)
    elif isinstance(payload, tuple | list):
        for item in payload:
            _tensors_of(item, found)


def _replaced(payload: Any, arrived: dict[int, Tensor]) -> Any:
    if isinstance(payload, Tensor):
        return arrived[id(payload)]
    if isinstance(payload, Parcel):
        return payload._replace(tensors=[arrived[id(tensor)] for tensor in payload.tensors])
    if isinstance(payload, tuple):
        return tuple(_replaced(item, arrived) for item in payload)
    return payload


class Workers:
    """A job in one thread, with one context made on worker 0."""

    def __init__(
        self, count: int, seed: int = 0, *, in_order: bool = True, engine_waits: float = 0.5
    ) -> None:
        self.network = Network(random.Random(seed), in_order=in_order, engine_waits=engine_waits)
        self.nodes = [Mailbox(i, self.network) for i in range(count)]
        self.context_id = self.nodes[0].autograd.new_context().id

    def context(self, worker: int) -> Context:
        """The part of a worker, which worker 0 has made by a call if nothing else did."""
        context = self.nodes[worker].autograd.container.find(self.context_id)
        if context is None:
            self.nodes[0].autograd.container.get(self.context_id).know(worker)
            context = self.nodes[worker].autograd.container.join(self.context_id, 0)
        assert context is not None
        return context

    def cross(self, source: int, target: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A message with these tensors, delivered at once."""
        arrived: list[Tensor] = []
        self._message(source, target, tensors)(arrived.extend)
        return arrived

    def cross_late(self, source: int, target: int, tensors: Sequence[Tensor]) -> None:
        """A message whose tensors nobody uses, delivered at some time."""
        arrive = self._message(source, target, tensors)
        self.network.send(source, target, lambda: arrive(lambda _: None), "call")

    def _message(
        self, source: int, target: int, tensors: Sequence[Tensor]
    ) -> Callable[[Callable[[list[Tensor]], None]], None]:
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        place = {id(tensor): i for i, tensor in enumerate(unique)}
        places = [place[id(tensor)] for tensor in tensors]
        scope = self.context(source).recording
        note = CROSSING.leaving(self.nodes[source], target, unique, scope)
        copies = [tensor.detach().clone() for tensor in unique]

        def arrive(use: Callable[[list[Tensor]], None]) -> None:
            arrived, _ = CROSSING.arriving(self.nodes[target], source, note, copies)
            use([arrived[i] for i in places])

        return arrive

    def backward(
        self,
        worker: int,
        roots: Sequence[Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        mode: Mode = Mode.SMART,
    ) -> None:
        options = Options(retain_graph, create_graph, mode)
        self.nodes[worker].autograd.backward(self.context(worker), roots, options)

    def gradient(self, worker: int, leaf: Tensor) -> Tensor | None:
        context = self.nodes[worker].autograd.container.find(self.context_id)
        return None if context is None else context.gradients().get(leaf)

    def release(self) -> None:
        self.nodes[0].autograd.release(self.context_id)
        self.network.drain()

    def leftovers(self) -> dict[str, dict[str, int]]:
        counts = {node.info.name: node.autograd.counts() for node in self.nodes}
        return {name: held for name, held in counts.items() if any(held.values())}

    def kill(self, worker: int) -> None:
        self.network.drop_of(worker)
        for node in self.nodes:
            if node.info.id != worker:
                node.lose(worker)

    @contextmanager
    def at(self, worker: int) -> Any:
        with working_in(self.context(worker)):
            yield


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a crossing is in one process."""
    unique = {id(tensor): tensor.clone() for tensor in tensors}
    return [unique[id(tensor)] for tensor in tensors]


torch.set_num_threads(1)
