"""What one worker knows of one context: what crossed, with whom, and the gradients.

A context is made by `with telegrad.autograd.context()` on one worker, its *origin*, and appears
on every other worker when a message first carries its id. Each worker has its own part: the sends
and recvs that took place there, the workers they were exchanged with, and the gradients of the
leaves that live there. No worker knows the whole.

One lock per context orders two things that must not interleave: a message that is recorded, and a
pass that takes its snapshot of what is recorded. A recv is either in the snapshot (and the pass
resolves it) or sees that the pass has begun (and is answered by *none*), never both nor neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import Node

from telegrad.autograd.errors import AutogradError
from telegrad.autograd.passes import Passes

if TYPE_CHECKING:
    from telegrad.autograd.enclosed import EnclosedCall, EnclosedSend, Enclosure
    from telegrad.autograd.leaves import Gradients
    from telegrad.autograd.messages import History
    from telegrad.autograd.participant import Participant
    from telegrad.rpc.limits import Ledger

WORKER_SHIFT = 48
COUNTER_MASK = (1 << WORKER_SHIFT) - 1


def worker_of(number: int) -> int:
    """The worker that made a context id, message id or pass id."""
    return number >> WORKER_SHIFT


class SendRecord(NamedTuple):
    """Tensors that left in one message. The node keeps their graph alive."""

    message: int
    peer: int
    node: Any

    @property
    def shapes(self) -> Sequence[tuple[torch.Size, torch.dtype]]:
        shapes: Sequence[tuple[torch.Size, torch.dtype]] = self.node.shapes
        return shapes

    @property
    def start(self) -> Any:
        """Where gradients enter the graph, as `plan.Source` has it."""
        return self.node


class RecvRecord(NamedTuple):
    """Tensors that arrived in one message: one node for each that needs a gradient."""

    message: int
    peer: int
    nodes: Sequence[Node]


@dataclass(slots=True, eq=False)
class Scope:
    """A context together with the grad mode of the code that speaks for it.

    A call made under `no_grad` still belongs to its context, but records nothing, and its
    function runs without grad on the other side, as it would in one process. `enclosed` is
    there if the code runs inside of a graph node.
    """

    context: Context
    recording: bool
    enclosed: EnclosedCall | None = None


class Context:
    """One worker's part of one context."""

    __slots__ = (
        "__weakref__",
        "_gradients",
        "_ledger",
        "_partners",
        "_uncommitted",
        "brought_by",
        "enclosures",
        "id",
        "known_workers",
        "lock",
        "participants",
        "passes",
        "recording",
        "recvs",
        "released",
        "sends",
    )

    def __init__(self, context_id: int, ledger: Ledger | None = None) -> None:
        """`ledger` bounds the sends and recvs that are kept for each other worker."""
        self.id = context_id
        self.brought_by: int | None = None
        """The worker that spoke of it first; None where it was made."""
        self._ledger = ledger
        self.lock = threading.Lock()
        self.released = False
        self.sends: dict[int, SendRecord | EnclosedSend] = {}
        self.recvs: dict[int, RecvRecord] = {}
        self.enclosures: list[Enclosure] = []
        self.known_workers: set[int] = set()
        self._partners: frozenset[int] = frozenset()
        self.passes = Passes()
        self.participants: dict[int, Participant] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._uncommitted: dict[int, Gradients] = {}
        self.recording = Scope(self, True)

    @property
    def silent(self) -> Scope:
        """The scope of code that runs without grad."""
        return Scope(self, False)

    @property
    def origin(self) -> int:
        return worker_of(self.id)

    def know(self, worker: int) -> None:
        """Note that messages of this context pass between `worker` and here."""
        self.known_workers.add(worker)

    def partners(self) -> frozenset[int]:
        """The workers with which tensors that need gradient were exchanged."""
        return self._partners

    def add_send(self, record: SendRecord | EnclosedSend) -> tuple[int, ...]:
        """Record a send to a worker that is known; tells which passes had begun here, and so do
        not wait for it."""
        with self.lock:
            if not self.released:
                if self._ledger is not None:
                    self._ledger.charge(record.peer)
                self.sends[record.message] = record
                if record.peer not in self._partners:
                    self._partners |= {record.peer}
            return self.passes.known()

    def take_back(self, message: int, peer: int) -> bool:
        """A message to that worker never reached it, so nobody knows of it there. Whether it was
        recorded here."""
        with self.lock:
            record = self.sends.get(message)
            if record is None or record.peer != peer:
                return False
            del self.sends[message]
            left = (*self.sends.values(), *self.recvs.values())
            self._partners = frozenset(each.peer for each in left)
            if self._ledger is not None:
                self._ledger.credit(peer)
            return True

    def add_recv(self, record: RecvRecord, begun_at_sender: Iterable[int]) -> list[int]:
        """Record a recv from a worker that is known; tells which passes wait for it at its sender
        and missed it here."""
        with self.lock:
            if not self.released:
                if self._ledger is not None and record.message not in self.recvs:
                    self._ledger.charge(record.peer)
                self.recvs[record.message] = record
                if record.peer not in self._partners:
                    self._partners |= {record.peer}
            begun = self.passes.begun
            return [p for p in begun if p not in set(begun_at_sender)] if begun else []

    def snapshot(
        self, pass_id: int
    ) -> tuple[Sequence[SendRecord | EnclosedSend], dict[int, RecvRecord], frozenset[int]]:
        """Begin a pass here: all that is recorded until now takes part in it. Sends, recvs, and
        the workers with which they were exchanged."""
        with self.lock:
            self.passes.begin(pass_id)
            return (*self.sends.values(),), self.recvs.copy(), self._partners

    def keep(self, pass_id: int, gradients: Gradients) -> None:
        """Hold what a pass found here; it counts unless the pass fails elsewhere."""
        with self.lock:
            if self._uncommitted:
                self._commit()
            self._uncommitted[pass_id] = gradients

    def discard(self, pass_id: int) -> None:
        """A pass failed: what it found here does not count."""
        with self.lock:
            self._uncommitted.pop(pass_id, None)

    def _commit(self) -> None:
        """Add up what passes found that can no longer fail, so that any number of them takes the
        memory of one. The lock is held."""
        for pass_id in list(self._uncommitted):
            if self.passes.is_over(pass_id):
                self._uncommitted.pop(pass_id).add_to(self._gradients)

    def own_pass_over(self, pass_id: int, failed: bool) -> list[Participant]:
        """A pass that began here has ended everywhere. Tells whose part is over by that."""
        with self.lock:
            return self._forget_below(self.passes.own_over(pass_id, failed))

    def passes_over(self, history: History) -> list[Participant]:
        """What the initiator of passes tells of those that have ended. Tells whose part is over by
        that."""
        with self.lock:
            return self._forget_below(history.over_below, history.failed)

    def _forget_below(self, bound: int, failed: Sequence[int] = ()) -> list[Participant]:
        if not self.passes.over_below(bound):
            return []
        for pass_id in failed:
            self._uncommitted.pop(pass_id, None)
        over = self.passes.is_over
        return [self.participants.pop(each) for each in [*self.participants] if over(each)]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of the leaves on this worker, over all passes of this context."""
        with self.lock:
            total = dict(self._gradients)
            for found in self._uncommitted.values():
                found.add_to(total)
            return total

    def gradients_of(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """As `gradients`, for these leaves. To look up a tensor is a call of a Python function."""
        with self.lock:
            total = {id(leaf): gradient for leaf, gradient in self._gradients.items()}
            for found in self._uncommitted.values():
                found.add_by_identity(total)
        return list(map(total.get, map(id, leaves)))

    def take_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """As `gradients_of`; the context has them no longer."""
        taken = self.gradients_of(leaves)
        with self.lock:
            for leaf in leaves:
                self._gradients.pop(leaf, None)
            for found in self._uncommitted.values():
                found.drop({*map(id, leaves)})
        return taken

    def let_go(self) -> None:
        """Drop all that the context holds, at once and not when the last reference dies."""
        with self.lock:
            if self.released and not self._uncommitted:
                return  # Nothing but what a pass found is kept by one that is released.
            self.released = True
            if self._ledger is not None:
                self._credit_all(self._ledger)
            self.sends.clear()
            self.recvs.clear()
            self.enclosures.clear()
            self._gradients.clear()
            self._uncommitted.clear()

    def _credit_all(self, ledger: Ledger) -> None:
        # Who sends or gets anything is known before. Others become known without the lock.
        peers = [*self.known_workers]
        if len(peers) == 1:
            ledger.credit(peers[0], len(self.sends) + len(self.recvs))
            return
        for record in (*self.sends.values(), *self.recvs.values()):
            ledger.credit(record.peer)


_current: ContextVar[Context | None] = ContextVar("telegrad autograd context", default=None)
# Context variables follow coroutines from thread to thread and start empty in every new thread.


def current_context() -> Context | None:
    """The context in which the calling thread or coroutine works."""
    return _current.get()


def current_scope() -> Scope | None:
    context = _current.get()
    if context is None:
        return None
    return context.recording if torch.is_grad_enabled() else context.silent


begin_work_in = _current.set
"""Make a context current; gives what `end_work` wants."""
end_work = _current.reset


class working_in:
    """Make `context` current; used while a remote function or a pass runs for it."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class speaking_for:
    """Work in the context of `scope`, with the grad mode of the code that it comes from."""

    __slots__ = ("_mode", "_scope", "_token")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        scope = self._scope
        self._token = _current.set(scope.context)
        self._mode = torch.is_grad_enabled()
        if self._mode is not scope.recording:
            torch.set_grad_enabled(scope.recording)

    def __exit__(self, *_: object) -> None:
        if torch.is_grad_enabled() is not self._mode:
            torch.set_grad_enabled(self._mode)
        _current.reset(self._token)


def refuse_nested() -> None:
    """A thread works in one context at a time."""
    outer = _current.get()
    if outer is not None:
        raise AutogradError(
            f"Already have an autograd context id for this thread: {outer.id}. Contexts do not "
            "nest: leave the outer `with telegrad.autograd.context()` block first."
        )
