"""Drives one worker's part of one pass: joins the core (`backward`) and the engine (`local`).

There is no thread of its own. Whoever brings an event while nobody drives becomes the driver: it
handles the event, runs the engine as far as it goes, and leaves. Events that come while someone
drives are put in the inbox; the driver takes them when it is done, or from inside the engine, where
it waits for just that. The caller of `backward` drives its own part and stays until the end.

Only the driver touches the core and the run, so neither needs a lock. The inbox has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.autograd.backward import Part, Post, check_gradients
from telegrad.autograd.context import Context, RecvRecord, SendRecord, worker_of, working_in
from telegrad.autograd.errors import AutogradError, BadGradient, PassFailed, UnusedResult
from telegrad.autograd.local import Run
from telegrad.autograd.messages import (
    Absent,
    Ack,
    Begin,
    Fail,
    Failure,
    Gradient,
    History,
    Message,
    Mode,
    Options,
)
from telegrad.autograd.plan import ROOTS, Source, State
from telegrad.rpc.errors import CallTimeout, RemoteTraceback, WorkerLost

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

PATIENCE = 1.0
"""Seconds that an engine call waits for a gradient before it gives its thread back."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """A message arrived for which this pass waits at its sender, too late to take part here."""

    record: RecvRecord


@dataclass(frozen=True, slots=True)
class Abandon:
    """The context was released, or the pass is known to be over: stop, and tell nobody."""

    reason: str


Event = Message | Lost | Missed | Abandon


class Abandoned(Exception):
    """Leaves an engine call of a pass that has failed."""


class Participant:
    """One worker's part of one pass of one context."""

    def __init__(
        self, service: Autograd, context: Context, pass_id: int, *, initiator: bool = False
    ) -> None:
        self.context = context
        self.pass_id = pass_id
        self._service = service
        self._node = service.node
        self._worker: int = service.node.info.id
        self._condition = service.node.runtime.condition()
        self._inbox: list[tuple[int, Event]] = []
        self._driving = initiator
        self._part: Part | None = None
        self._run: Run | None = None
        self._partners: frozenset[int] = frozenset()
        self._early: list[tuple[int, Absent]] = []
        self._sends: dict[int, SendRecord] = {}
        self._peer_of_recv: dict[int, int] = {}
        self._resolved = 0
        self._error: BaseException | None = None
        self._active = False

    # For the initiator.

    def lead(
        self,
        roots: Sequence[Tensor],
        options: Options,
        history: History,
        timeout: float | None = None,
    ) -> None:
        """Run the whole pass; returns when it is over on every worker."""
        runtime = self._node.runtime
        deadline = math.inf if timeout is None else runtime.now() + timeout
        try:
            part = self._join(options, history, roots)
            self._advance()
            while part.failure is None and not part.ended:
                self._await_news(part, deadline - runtime.now(), timeout)
                self._advance()
            self._raise_failure()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._condition:
                self._driving = False
                self._inbox.clear()
            self._clean_up()

    def _await_news(self, part: Part, left: float, timeout: float | None) -> None:
        patience = self._service.stall_time if part.muted else math.inf
        until = min(left, patience)
        batch = self._next(None if until == math.inf else until)
        self._handle_all(batch)
        if batch:
            return
        if until == left:
            raise CallTimeout(
                f"backward in context {self.context.id} did not end in {timeout} s. It waits for "
                f"the workers {sorted(map(self._node.members.name, self._partners))}."
            )
        self._send(part.probe(self._partners))

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        failure = self._part.failure if self._part is not None else None
        if failure is not None:
            error = PassFailed(f"Error on Node {failure.worker}: {failure.message}")
            raise error from RemoteTraceback(failure.worker_name, failure.traceback)

    # For everyone else.

    def deliver(self, sender: int, event: Event) -> None:
        """Something happened. If nobody drives, the calling thread does."""
        with self._condition:
            self._inbox.append((sender, event))
            if self._driving:
                self._condition.notify_all()
                return
            self._driving = True
        while True:
            with self._condition:
                batch, self._inbox = self._inbox, []
                if not batch:
                    self._driving = False
                    return
            self._handle_all(batch)
            self._advance()
            self._clean_up()
            # Its traceback holds the graph, and the others have been told.
            self._error = None

    # Outlet of the run: called from inside the engine.

    def gradient(self, message: int, gradients: Sequence[Tensor | None]) -> None:
        assert self._part is not None
        self._send(self._part.gradient(self._peer_of_recv[message], message, gradients))

    def absent(self, message: int) -> None:
        assert self._part is not None
        self._part.absent(self._peer_of_recv[message], message)

    def wait(self, source: Source) -> None:
        part = self._part
        assert part is not None
        self._send(part.rest(self._partners))
        before = self._resolved
        while self._resolved == before:
            batch = self._next(PATIENCE)
            if not batch:
                return
            self._handle_all(batch)
            if part.failure is not None:
                raise Abandoned

    def _next(self, timeout: float | None) -> list[tuple[int, Event]]:
        """The events that came; none if the time is up."""
        if not self._inbox:
            self._node.transport.blocking()
        runtime = self._node.runtime
        deadline = None if timeout is None else runtime.now() + timeout
        with self._condition:
            while not self._inbox:
                left = None if deadline is None else deadline - runtime.now()
                if left is not None and left <= 0:
                    break
                self._condition.wait(left)
            batch, self._inbox = self._inbox, []
            return batch

    # Events.

    def _handle_all(self, batch: list[tuple[int, Event]]) -> None:
        for sender, event in batch:
            try:
                self._handle(sender, event)
            except Exception as error:
                self._fail(error)

    def _handle(self, sender: int, event: Event) -> None:
        if isinstance(event, Begin | Gradient):
            self._service.learn(self.context, event.history)
            if self._part is None:
                self._join(event.options, event.history, None)
        part = self._part
        if part is None:
            self._handle_outside(sender, event)
        elif part.failure is None:
            self._handle_inside(part, sender, event)

    def _handle_outside(self, sender: int, event: Event) -> None:
        """Nothing has engaged this worker in the pass so far."""
        match event:
            case Absent():
                self._early.append((sender, event))
            case Fail(failure):
                self._flood(failure, sender)

    def _handle_inside(self, part: Part, sender: int, event: Event) -> None:
        match event:
            case Gradient(_, _, engages, message, gradients):
                if engages:
                    self._send(part.engage(sender))
                else:
                    part.overtook(sender)
                self._resolve(part, sender, message, gradients)
            case Begin():
                self._send(part.begin(sender, self._partners))
            case Absent(messages):
                for message in messages:
                    self._resolve(part, sender, message, None)
            case Ack():
                part.acknowledged()
            case Fail(failure):
                self._flood(failure, sender)
            case Missed(record):
                part.absent(record.peer, record.message)
            case Lost(worker, reason):
                if part.depends_on(worker, self._partners):
                    raise self._lost_error(worker, reason)
            case Abandon(reason):
                self._abandon(part, reason)

    def _lost_error(self, worker: int, reason: str) -> WorkerLost:
        name = self._node.members.name(worker)
        return WorkerLost(
            f"Worker {name!r} ({worker}) is gone, the backward pass needs it: {reason}."
        )

    def _join(self, options: Options, history: History, roots: Sequence[Tensor] | None) -> Part:
        part = Part(self._worker, worker_of(self.pass_id), options, history)
        self._part = part
        self._service.pass_began()
        self._active = True
        sends, recvs = self.context.snapshot(self.pass_id)
        self._sends = {record.message: record for record in sends}
        self._peer_of_recv = {record.message: record.peer for record in recvs}
        peers = {record.peer for record in sends} | {record.peer for record in recvs}
        self._partners = frozenset(peers - {self._worker})
        if self.context.released:
            raise AutogradError(f"Context {self.context.id} was released during backward.")
        for worker, reason in self._node.lost_workers().items():
            if worker in self._partners:
                raise self._lost_error(worker, reason)
        sources = [] if roots is None else [_root_source(roots)]
        sources += [Source(r.message, r.node.next_functions, r.node, r.peer) for r in sends]
        self._run = Run(
            sources,
            {record.message: record.count for record in recvs},
            self,
            retain_graph=options.retain_graph,
            create_graph=options.create_graph,
        )
        early, self._early = self._early, []
        for sender, event in early:
            for message in event.messages:
                self._resolve(part, sender, message, None)
        return part

    def _resolve(
        self, part: Part, sender: int, message: int, gradients: Sequence[Tensor | None] | None
    ) -> None:
        if part.complete:
            return
        assert self._run is not None
        source = self._run.sources.get(message)
        if source is None or message == ROOTS:
            if message not in self.context.sends:
                raise BadGradient(
                    f"Worker {sender} sent gradients for message {message}, which worker "
                    f"{self._worker} never sent in context {self.context.id}."
                )
            return  # Sent after the pass began here: it does not take part.
        record = self._sends[message]
        check_gradients(record, sender, gradients)
        if source.state is not State.PENDING:
            raise BadGradient(
                f"The gradients of message {message}, sent to worker {record.peer}, came twice."
            )
        if gradients is None and part.options.mode is Mode.FAST:
            raise self._unused(record)
        self._run.resolve(message, gradients)
        self._resolved += 1

    def _unused(self, record: SendRecord) -> UnusedResult:
        peer = self._node.members.name(record.peer)
        shapes = ", ".join(f"{dtype} {tuple(shape)}" for shape, dtype in record.shapes)
        return UnusedResult(
            f"FAST mode expects every tensor that crossed to be used, but worker {peer!r} never "
            f"used what worker {self._node.info.name!r} sent to it in message {record.message} "
            f"({shapes}). Use mode='smart', or use the result of that call."
        )

    # Progress.

    def _advance(self) -> None:
        part, run = self._part, self._run
        if part is None or part.failure is not None:
            return
        try:
            if run is not None and not part.complete:
                self._run_engine(run, part)
        except Abandoned:
            return
        except Exception as error:
            self._fail(error)
            return
        self._send(part.rest(self._partners))
        self._send(part.report())

    def _run_engine(self, run: Run, part: Part) -> None:
        with working_in(self.context):
            while run.step():
                pass
            if not run.finished:
                return
            run.settle()
        self.context.keep(self.pass_id, run.gradients)
        run.close()
        part.complete = True
        self._retire()

    def _send(self, posts: list[Post]) -> None:
        for post in posts:
            self._service.post(self.context, self.pass_id, post)

    # Ending.

    def _fail(self, error: BaseException) -> None:
        if self._part is not None and self._part.failure is not None:
            return
        self._error = error
        self._flood(Failure.of(error, self._worker, self._node.info.name), None)

    def _flood(self, failure: Failure, sender: int | None) -> None:
        if self._part is None:
            self._part = Part(self._worker, worker_of(self.pass_id), Options(), History())
        audience = self._partners | self.context.partners()
        self._send(self._part.fail(failure, audience, sender))
        self.context.discard(self.pass_id)

    def _abandon(self, part: Part, reason: str) -> None:
        if not part.ended:
            self._error = AutogradError(reason)
            part.fail(Failure.of(self._error, self._worker, self._node.info.name), (), None)

    def _clean_up(self) -> None:
        if self._part is not None and self._part.failure is not None:
            if self._run is not None:
                self._run.close()
            self._run = None
            self._retire()

    def _retire(self) -> None:
        self._sends, self._peer_of_recv = {}, {}
        if self._active:
            self._active = False
            self._service.pass_left()


def _root_source(roots: Sequence[Tensor]) -> Source:
    edges = [(root.grad_fn, root.output_nr) for root in roots]
    source = Source(ROOTS, edges)
    source.state = State.GRADIENT
    with torch.no_grad():
        source.gradients = [torch.ones_like(root) for root in roots]
    return source
