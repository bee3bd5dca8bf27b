"""Drives one worker's part of one pass: joins the core (`backward`) and the engine (`local`).

There is no thread of its own. Whoever brings an event while nobody drives becomes the driver: it
handles the event, runs the engine as far as it goes, and leaves. Events that come while someone
drives are put in the inbox; the driver takes them when it is done, or from inside the engine, where
it waits for just that. The caller of `backward` drives first, and then waits: what comes is handled
by the thread that reads it, without waking anyone, until the pass is over.

Only the driver touches the core and the run, so neither needs a lock. The inbox has one. Waiting
is rare, so the condition to wait on is made by who waits first, before it looks at what it waits
for; who changes that looks for the condition afterwards. So nobody is left asleep.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from telegrad.autograd.answer import Answer
from telegrad.autograd.backward import (
    Part,
    Post,
    acknowledges,
    check_gradients,
    engages,
    merge_ack,
)
from telegrad.autograd.context import Context, SendRecord, worker_of, working_in
from telegrad.autograd.enclosed import EnclosedSend
from telegrad.autograd.errors import AutogradError, BadGradient, PassFailed, UnusedResult
from telegrad.autograd.events import (
    Abandon,
    Asked,
    Event,
    Lost,
    Missed,
    Stalled,
    Stopped,
)
from telegrad.autograd.local import Run
from telegrad.autograd.messages import (
    Absent,
    Ack,
    Begin,
    Fail,
    Failure,
    Gradient,
    History,
    Mode,
    Options,
    decode,
    encode,
)
from telegrad.autograd.plan import ROOTS, Source, State
from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import CallTimeout, RemoteTraceback, WorkerLost
from telegrad.rpc.runtime import Condition

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

PATIENCE = 1.0
"""Seconds that an engine call waits for a gradient before it gives its thread back."""


_BEGINNINGS = (Gradient, Begin)


class Abandoned(Exception):
    """Leaves an engine call of a pass that has failed."""


class Participant:
    """One worker's part of one pass of one context."""

    __slots__ = (
        "_answer",
        "_condition",
        "_deadline",
        "_driving",
        "_early",
        "_error",
        "_held",
        "_inbox",
        "_lock",
        "_node",
        "_part",
        "_partners",
        "_peer_of_recv",
        "_pending",
        "_resolved",
        "_run",
        "_sends",
        "_service",
        "_timeout",
        "_unread",
        "_worker",
        "active",
        "context",
        "pass_id",
    )

    def __init__(
        self, service: Autograd, context: Context, pass_id: int, *, initiator: bool = False
    ) -> None:
        self.context = context
        self.pass_id = pass_id
        self._service = service
        self._node = service.node
        self._worker: int = service.node.info.id
        self._lock = threading.Lock()
        self._condition: Condition | None = None
        self._inbox: list[tuple[int, Event]] = []
        self._driving = initiator
        self._part: Part | None = None
        self._run: Run | None = None
        self._partners: frozenset[int] = frozenset()
        self._held: list[Post] = []
        self._early: list[tuple[int, Absent]] = []
        self._sends: dict[int, SendRecord | EnclosedSend] = {}
        self._peer_of_recv: dict[int, int] = {}
        self._resolved = 0
        self._error: BaseException | None = None
        self._answer: Answer | None = None
        self._pending: Pending | None = None
        self._unread: Pending | None = None
        """The same, until it is settled who reads the answer."""
        self.active = False
        """The local part has begun and not ended."""
        self._deadline = math.inf
        self._timeout: float | None = None

    @property
    def idle(self) -> bool:
        """Nothing is going on here that anyone would have to be told to stop."""
        part = self._part
        return not self._driving and part is not None and part.ended

    # For the initiator.

    def lead(
        self,
        roots: Sequence[Tensor],
        options: Options,
        history: History,
        timeout: float | None = None,
    ) -> None:
        """Run the whole pass; returns when it is over on every worker."""
        if timeout is not None:
            self._timeout, self._deadline = timeout, self._node.runtime.now() + timeout
        try:
            part = self._join(options, history, roots)
            self._advance(asks=True)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._clean_up()
            self._drive()
        self._see_through(part)

    def open(
        self,
        roots: Sequence[Tensor],
        options: Options,
        history: History,
        timeout: float | None = None,
    ) -> Run:
        """Begin a pass whose local part is done by the caller, who works with the run."""
        if timeout is not None:
            self._timeout, self._deadline = timeout, self._node.runtime.now() + timeout
        try:
            self._join(options, history, roots)
        except BaseException as error:
            self.give_up(error)
            raise
        assert self._run is not None
        return self._run

    def close(self) -> None:
        """The caller has done the local part: run what is left, and see the pass through."""
        part = self._part
        assert part is not None
        self._advance(asks=True)
        self._clean_up()
        self._drive()
        self._see_through(part)

    def give_up(self, error: BaseException) -> None:
        """The caller could not do the local part; raises what went wrong elsewhere before."""
        self._fail(error)
        self._clean_up()
        self._drive()
        if self._part is not None and isinstance(error, Abandoned):
            self._raise_failure(self._part)

    def _see_through(self, part: Part) -> None:
        """The caller of `backward` has done its share: wait for the end, and say how it was."""
        try:
            unread = self._take_unread()
            if unread is not None:
                self._await_answer(part, unread)
            self._await_end(part)
        except BaseException as error:
            self.deliver(self._worker, Stopped(error))
            raise
        self._raise_failure(part)

    def _await_answer(self, part: Part, pending: Pending) -> None:
        """Read the answer of the worker that was asked, on this thread, and drive with it."""
        node = self._node
        while not pending.done:
            node.transport.wait(pending, min(self._deadline, self._patience_ends(part)))
            if not pending.done:
                if node.runtime.now() >= self._deadline:
                    node.drop(pending)
                    return
                self.deliver(self._worker, Stalled())
        self._deliver_answer(pending)

    def _deliver_answer(self, pending: Pending) -> None:
        node = self._node
        if pending.frame is None and (pending.error is None or node.is_lost(pending.callee.id)):
            return  # The pass has ended without it, or is about to.
        payload = node.outcome(pending)
        if payload is not None:
            self.deliver(pending.callee.id, decode(payload)[2])

    def _take_unread(self) -> Pending | None:
        with self._lock:
            unread, self._unread = self._unread, None
        return unread

    def _let_others_read_the_answer(self) -> None:
        """The caller of `backward` drives, and waits for what the answer may bring: it cannot read
        it as well."""
        unread = self._take_unread()
        if unread is None:
            return

        def read() -> None:
            try:
                self._deliver_answer(unread)
            except BaseException as error:
                self.deliver(self._worker, Stopped(error))

        self._node.when_settled(unread, read)

    def _patience_ends(self, part: Part) -> float:
        return self._node.runtime.now() + self._service.stall_time if part.muted else math.inf

    def _await_end(self, part: Part) -> None:
        """Wait while those who bring messages drive."""
        if part.ended and not self._driving:
            return
        runtime = self._node.runtime
        while not self._has_ended(part, min(self._deadline, self._patience_ends(part))):
            if runtime.now() >= self._deadline:
                raise self._too_late()
            self.deliver(self._worker, Stalled())

    def _too_late(self) -> CallTimeout:
        partners = sorted(map(self._node.members.name, self._partners))
        return CallTimeout(
            f"backward in context {self.context.id} did not end in {self._timeout} s. It waits "
            f"for the workers {partners}."
        )

    def _has_ended(self, part: Part, until: float) -> bool:
        """Wait for the end, but not longer than that."""
        runtime = self._node.runtime
        if not (part.ended or part.failure is not None):
            self._node.transport.blocking()
        condition = self._made_condition()
        with condition:
            while self._driving or not (part.ended or part.failure is not None):
                left = until - runtime.now()
                if left <= 0:
                    return False
                condition.wait(None if left == math.inf else left)
            return True

    def _made_condition(self) -> Condition:
        with self._lock:
            if self._condition is None:
                self._condition = self._node.runtime.condition()
            return self._condition

    def _wake(self) -> None:
        """What someone may wait for has changed."""
        condition = self._condition
        if condition is not None:
            with condition:
                condition.notify_all()

    def _raise_failure(self, part: Part) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback knows this frame: without this the two would keep each other.
                del error
        failure = part.failure
        if failure is not None:
            raise PassFailed(
                f"Error on Node {failure.worker}: {failure.message}"
            ) from RemoteTraceback(failure.worker_name, failure.traceback)

    # For everyone.

    def deliver(self, sender: int, event: Event) -> None:
        """Something happened. If nobody drives, the calling thread does."""
        with self._lock:
            drives = not self._driving
            if drives:
                self._driving = True
            else:
                self._inbox.append((sender, event))
        if drives:
            self._drive(((sender, event),))
        else:
            self._wake()

    def _drive(self, batch: Sequence[tuple[int, Event]] = ()) -> None:
        """Handle these events and all that come meanwhile. The caller has set `_driving`."""
        while True:
            if batch:
                self._handle_all(batch)
                self._advance()
                self._clean_up()
            with self._lock:
                if not self._inbox:
                    self._driving = False
                    break
                batch, self._inbox = self._inbox, []
        self._wake()
        if self._pending is not None:
            part = self._part
            if part is not None and (part.ended or part.failure is not None):
                self._node.drop(self._pending)

    # Outlet of the run: called from inside the engine.

    def gradient(self, message: int, gradients: Sequence[Tensor | None]) -> None:
        assert self._part is not None
        assert self._run is not None
        posts = self._part.gradient(self._peer_of_recv[message], message, gradients)
        if self._run.brief:
            self._held += posts
        else:
            self._send(posts)

    def absent(self, message: int) -> None:
        assert self._part is not None
        self._part.absent(self._peer_of_recv[message], message)

    def wait(self, source: Source) -> None:
        part = self._part
        assert part is not None
        posts, self._held = self._held, []
        self._send(posts + part.rest(self._partners))
        before = self._resolved
        while self._resolved == before:
            batch = self._next(PATIENCE)
            if not batch:
                return
            self._handle_all(batch)
            if part.failure is not None:
                raise Abandoned

    def wait_enclosed(self, source: Source) -> None:
        part = self._part
        assert part is not None
        self._send(part.rest(self._partners))
        runtime = self._node.runtime
        while source.state is State.PENDING:
            until = min(self._deadline, self._patience_ends(part))
            batch = self._next(None if until == math.inf else until - runtime.now())
            self._handle_all(batch)
            if part.failure is not None:
                raise Abandoned
            if runtime.now() >= self._deadline:
                raise self._too_late()
            if not batch:
                self._send(part.probe(self._partners))

    def _next(self, timeout: float | None) -> list[tuple[int, Event]]:
        """The events that came; none if the time is up."""
        if not self._inbox:
            self._let_others_read_the_answer()
            self._node.transport.blocking()
        runtime = self._node.runtime
        deadline = None if timeout is None else runtime.now() + timeout
        condition = self._made_condition()
        with condition:
            while not self._inbox:
                left = None if deadline is None else deadline - runtime.now()
                if left is not None and left <= 0:
                    break
                condition.wait(left)
        with self._lock:
            batch, self._inbox = self._inbox, []
        return batch

    # Events.

    def _handle_all(self, batch: Sequence[tuple[int, Event]]) -> None:
        for sender, event in batch:
            try:
                self._handle(sender, event)
            except Exception as error:
                self._fail(error)

    def _handle(self, sender: int, event: Event) -> None:
        if type(event) is Asked:
            self._answer, event = event.answer, event.message
        if isinstance(event, _BEGINNINGS):
            if event.history.over_below:
                self._service.learn(self.context, event.history)
            if self._part is None:
                self._join(event.options, event.history, None)
        part = self._part
        if part is None:
            self._handle_outside(sender, event)
        elif part.failure is None:
            self._handle_inside(part, sender, event)
            if self._answer is not None and not part.owes(self._answer.asker):
                self._answer.give()

    def _handle_outside(self, sender: int, event: Event) -> None:
        """Nothing has engaged this worker in the pass so far."""
        match event:
            case Absent():
                self._early.append((sender, event))
            case Fail(failure):
                self._flood(failure, sender)

    def _handle_inside(self, part: Part, sender: int, event: Event) -> None:
        match event:
            case Gradient(_, _, engages, message, gradients, acknowledges):
                if not engages:
                    part.overtook(sender)
                elif answer := part.engage(sender):
                    self._send(answer)
                self._resolve(part, sender, message, gradients)
                if acknowledges:
                    part.acknowledged()
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
            case Stalled():
                self._send(part.probe(self._partners))
            case Stopped(error):
                self._fail(error)

    def _lost_error(self, worker: int, reason: str) -> WorkerLost:
        name = self._node.members.name(worker)
        return WorkerLost.saying(
            f"Worker {name!r} ({worker}) is gone, the backward pass needs it: {reason}.",
            name,
            reason,
            f"the backward pass of context {self.context.id}",
        )

    def _join(self, options: Options, history: History, roots: Sequence[Tensor] | None) -> Part:
        part = Part(self._worker, worker_of(self.pass_id), options, history)
        self._part = part
        self.active = True
        sends, recvs = self.context.snapshot(self.pass_id)
        sources = [] if roots is None else [_root_source(roots)]
        counts: dict[int, int] = {}
        peers: set[int] = set()
        for record in sends:
            self._sends[record.message] = record
            peers.add(record.peer)
            sources.append(Source(record.message, record.edges, record.node, record.peer))
        for arrived in recvs:
            self._peer_of_recv[arrived.message] = arrived.peer
            peers.add(arrived.peer)
            counts[arrived.message] = len(arrived.nodes)
        peers.discard(self._worker)
        self._partners = frozenset(peers)
        if self.context.released:
            raise AutogradError(f"Context {self.context.id} was released during backward.")
        for worker, reason in self._node.lost_workers().items():
            if worker in self._partners:
                raise self._lost_error(worker, reason)
        self._run = Run(
            sources,
            counts,
            self,
            retain_graph=options.retain_graph,
            create_graph=options.create_graph,
            enclosures=self.context.enclosures,
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

    def _unused(self, record: SendRecord | EnclosedSend) -> UnusedResult:
        peer = self._node.members.name(record.peer)
        shapes = ", ".join(f"{dtype} {tuple(shape)}" for shape, dtype in record.shapes)
        return UnusedResult(
            f"FAST mode expects every tensor that crossed to be used, but worker {peer!r} never "
            f"used what worker {self._node.info.name!r} sent to it in message {record.message} "
            f"({shapes}). Use mode='smart', or use the result of that call."
        )

    # Progress.

    def _advance(self, asks: bool = False) -> None:
        """Run the engine as far as it goes, and send what came of it. `asks`: the calling thread
        has nothing else to do afterwards than to wait for an answer."""
        part, run = self._part, self._run
        if part is None or part.failure is not None:
            return
        try:
            if run is not None and not part.complete:
                self._run_engine(run, part)
        except Abandoned:
            return
        except BaseException as error:
            self._fail(error)
            return
        posts, self._held = self._held, []
        posts += part.rest(self._partners)
        posts = merge_ack(posts, part.report())
        if asks and posts:
            posts = self._ask(posts)
        self._send(posts)

    def _run_engine(self, run: Run, part: Part) -> None:
        with working_in(self.context):
            run.step()
            if not run.finished:
                return
            run.settle()
        self.context.keep(self.pass_id, run.gradients)
        run.close()
        part.complete = True
        self._retire()

    def _ask(self, posts: list[Post]) -> list[Post]:
        """Send the last message that engages as a call; the others are left."""
        for place in reversed(range(len(posts))):
            if engages(posts[place].message):
                self._send(posts[:place])
                asked = self._service.ask(self.context, self.pass_id, posts[place])
                self._pending = self._unread = asked
                return posts[place + 1 :]
        return posts

    def _send(self, posts: list[Post]) -> None:
        answer = self._answer
        for post in posts:
            if answer is not None and post.to == answer.asker and acknowledges(post.message):
                answer.give(encode(self.context.id, self.pass_id, post.message))
                self._answer = answer = None
            else:
                self._service.post(self.context, self.pass_id, post)

    # Ending.

    def _fail(self, error: BaseException) -> None:
        if self._part is not None and self._part.failure is not None:
            return
        if worker_of(self.pass_id) == self._worker:
            # Elsewhere nobody raises it, and its traceback would hold the graph.
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
            error = AutogradError(reason)
            part.fail(Failure.of(error, self._worker, self._node.info.name), (), None)
            self._error = error

    def _clean_up(self) -> None:
        if self._part is not None and self._part.failure is not None:
            if self._answer is not None:
                self._answer.give()
            if self._run is not None:
                self._run.close()
            self._run = None
            self._retire()

    def _retire(self) -> None:
        self._sends, self._peer_of_recv = {}, {}
        self.active = False


def _root_source(roots: Sequence[Tensor]) -> Source:
    edges = [(root.grad_fn, root.output_nr) for root in roots]
    source = Source(ROOTS, edges)
    source.state = State.GRADIENT
    source.gradients = [root.new_ones(root.shape) for root in roots]
    return source
