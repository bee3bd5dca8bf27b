"""Autograd on one worker: its contexts, its passes, and what it says to the other workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from telegrad.autograd import torch_private
from telegrad.autograd.answer import Answer
from telegrad.autograd.backward import Post
from telegrad.autograd.censuses import Censuses, read_number
from telegrad.autograd.container import Container
from telegrad.autograd.context import WORKER_SHIFT, Context, RecvRecord, Scope, worker_of
from telegrad.autograd.describe import DESCRIBE, Part, part_of
from telegrad.autograd.errors import AutogradError, ContextLost, UnknownContext
from telegrad.autograd.events import Abandon, Asked, Lost, Missed, Stopped
from telegrad.autograd.initiator import Initiator
from telegrad.autograd.local import Run
from telegrad.autograd.messages import (
    TOPIC,
    Begin,
    Fail,
    Failure,
    Gradient,
    History,
    Message,
    Options,
    Sequel,
    decode,
    encode,
)
from telegrad.autograd.nodes import engine_thread
from telegrad.autograd.participant import Participant
from telegrad.autograd.references import BACKWARD, backward_from, backward_on_owner
from telegrad.autograd.refusals import Refusals
from telegrad.autograd.releases import Releases
from telegrad.autograd.sequels import Follower, Sequels
from telegrad.rpc.calls import Pending, afresh
from telegrad.rpc.errors import JobClosed, TelegradError
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.results import Finish, Later

STALL_TIME = 5.0


class Autograd:
    """The autograd layer of one node."""

    def __init__(self, node: Any) -> None:
        torch_private.make_engine()
        self.node = node
        self.container = Container(
            node.info.id,
            ledger=node.ledger("contexts"),
            records=node.ledger("records"),
            may_be_worker=self.may_be_worker,
        )
        self._passes = node.ledger("passes")
        self._censuses = Censuses(self)
        self.sequels = Sequels()
        self._releases = Releases(node.runtime, self._censuses.tell)
        self.stall_time = STALL_TIME
        first: int = (node.info.id << WORKER_SHIFT) + 1
        self.next_message = itertools.count(first).__next__
        node.on_post(TOPIC, self._on_pass_message)
        node.on_operation(TOPIC, self._on_asked)
        node.on_operation(BACKWARD, self._on_backward)
        node.on_operation(DESCRIBE, self._on_describe)
        node.on_lost(self._on_lost)
        node.on_closed(self._on_closed)
        self.refusals = Refusals(self)

    # Contexts.

    def new_context(self) -> Context:
        return self.container.new()

    def release(self, context_id: int) -> None:
        """Let go of a context here, and on every worker that knows it."""
        context = self.container.release_own(context_id)
        if context is not None:
            # The flag before the look at the workers, as `leaving` looks after it has added one:
            # a message leaves either without a note or to a worker that is told.
            self.end(context)
            self._releases.add(context, self.container.still_open)

    def end_earlier(self, context: Context) -> None:
        """The origin of a context has released all that it made before: hold nothing for those.

        They are not forgotten yet. That is up to the census, which will be passed on to those who
        know them.
        """
        for earlier in self.container.take_earlier(context):
            self.end(earlier)

    def _on_describe(self, sender: int, context_id: int) -> Part | None:
        return part_of(self.container.find(read_number(context_id)))

    def may_be_worker(self, worker: int) -> bool:
        """Where others may lie, only those who are in the job are worth remembering."""
        return not self.node.data_only or self.node.members.has(worker)

    def end(self, context: Context, error: TelegradError | None = None) -> None:
        """A context is no more; passes that take place in it end with that error."""
        context.let_go()
        if not context.participants:
            return
        error = error or AutogradError(f"Context {context.id} was released during backward.")
        for pass_id, participant in list(context.participants.items()):
            if not participant.idle:
                participant.deliver(self.node.info.id, Abandon(afresh(error)))
            # Whoever takes it out settles its account: the pass may just be over, too.
            if context.participants.pop(pass_id, None) is not None:
                self._let_go_of(participant)

    def _let_go_of(self, participant: Participant) -> None:
        if participant.brought_by is not None:
            self._passes.credit(participant.brought_by)

    def _on_lost(self, worker: int, reason: str) -> None:
        for context in self.container.lose(worker):
            self.end(context, self._lost_with(context.id, worker, reason))
        for context in self.container:
            if worker in context.known_workers and context.origin != self.node.info.id:
                self._censuses.report(context.id)
            for participant in list(context.participants.values()):
                participant.deliver(self.node.info.id, Lost(worker, reason))

    def _on_closed(self) -> None:
        """Nothing comes any more that a pass could wait for."""
        name = self.node.info.name
        for context in self.container:
            error = JobClosed(f"Worker {name!r} shut down during backward in context {context.id}.")
            for participant in list(context.participants.values()):
                if not participant.idle:
                    participant.deliver(self.node.info.id, Stopped(afresh(error)))

    def _lost_with(self, context_id: int, worker: int, reason: str) -> ContextLost:
        name = self.node.members.name(worker)
        return ContextLost.saying(
            f"Worker {name!r} ({worker}), where context {context_id} was made, is gone, and the "
            f"context with it: {reason}.",
            name,
            reason,
            f"context {context_id}",
        )

    def context(self, context_id: int) -> Context:
        """This worker's part of a context; the error says why there is none."""
        try:
            return self.container.get(context_id)
        except UnknownContext:
            origin = worker_of(context_id) if type(context_id) is int else -1
            reason = self.node.lost_workers().get(origin)
            if reason is None:
                raise
            raise self._lost_with(context_id, origin, reason) from None

    # Passes.

    def backward(
        self,
        context: Context,
        roots: Sequence[Tensor],
        options: Options,
        timeout: float | None = None,
    ) -> None:
        """Initiate a pass and see it through."""
        initiator, history = self._initiate(context)
        failed = True
        try:
            initiator.lead(roots, options, history, timeout)
            failed = False
        finally:
            self.pass_over(context, initiator.pass_id, failed)

    def _initiate(self, context: Context) -> tuple[Initiator, History]:
        with context.lock:
            pass_id = context.passes.next_own(self.node.info.id)
            initiator = context.participants[pass_id] = Initiator(self, context, pass_id)
            return initiator, context.passes.own_history()

    def open_pass(
        self, context: Context, options: Options, timeout: float | None = None
    ) -> OpenPass:
        """Initiate a pass whose local part the caller does: that of the calls in enclosures."""
        initiator, history = self._initiate(context)
        opened = OpenPass(self, initiator)
        with opened.failing():
            opened.run = initiator.open(options, history, timeout)
        engine_thread.running = opened.run
        return opened

    def pass_over(self, context: Context, pass_id: int, failed: bool) -> None:
        self._dismiss(context.own_pass_over(pass_id, failed))

    def backward_from(self, rref: Any, context_id: int, retain_graph: bool) -> None:
        """`RRef.backward`."""
        backward_from(self, rref, context_id, bool(retain_graph))

    def _on_backward(
        self, sender: int, reference: Any, context_id: int, retain_graph: bool
    ) -> None:
        named = ReferenceId(*map(read_number, reference))
        backward_on_owner(self, named, read_number(context_id), bool(retain_graph))

    def learn(self, context: Context, history: History) -> None:
        """A message told which earlier passes of its initiator are over."""
        if history.over_below:
            self._dismiss(context.passes_over(history))

    def _dismiss(self, participants: list[Participant]) -> None:
        """The context knows these no longer: their passes are over."""
        for participant in participants:
            self._let_go_of(participant)
            if not participant.idle:
                participant.deliver(self.node.info.id, Abandon(AutogradError("The pass is over.")))

    def follower(self, pass_id: int, sequel: Sequel) -> Follower | None:
        """Who is called when a pass is complete here. Where workers do not trust each other, only
        who began the pass: what others may have run here is what was exported."""
        if self.node.data_only and worker_of(pass_id) != self.node.info.id:
            return None
        return self.sequels.follower(sequel)

    def missed(self, context: Context, passes: list[int], record: RecvRecord) -> None:
        """A message arrived after these passes began here, and before they did at its sender."""
        for pass_id in passes:
            participant = context.participants.get(pass_id)
            if participant is not None:
                participant.deliver(record.peer, Missed(record))

    def _on_pass_message(self, sender: int, payload: Any) -> None:
        context_id, pass_id, message = decode(payload)
        try:
            participant = self._participant(context_id, pass_id, sender)
            if participant is not None:
                participant.deliver(sender, message)
        except Exception as error:
            if type(message) is not Fail:
                failure = Failure.of(error, self.node.info.id, self.node.info.name)
                self.node.post(sender, TOPIC, encode(context_id, pass_id, Fail(failure)))
            raise

    def _on_asked(self, sender: int, payload: Any) -> Later | None:
        """The initiator of a pass waits for what this worker has to say."""
        context_id, pass_id, message = decode(payload)
        participant = self._participant(context_id, pass_id, sender)
        if participant is None:
            return None

        def deliver(finish: Finish) -> None:
            participant.deliver(sender, Asked(message, Answer(sender, finish)))

        return Later(deliver)

    def _participant(self, context_id: int, pass_id: int, sender: int) -> Participant | None:
        """This worker's part of a pass, made on demand; None if there is nothing to do for it."""
        if self.node.data_only and not self._takes_part(context_id, sender):
            return None
        # A message of a pass may overtake the call that would have brought its context here.
        context = self.container.join(context_id, sender)
        if context is None:
            return None
        participant = context.participants.get(pass_id)
        if participant is not None:
            return participant
        initiator = pass_id >> WORKER_SHIFT
        if not self.may_be_worker(initiator):
            raise AutogradError(
                f"Worker {self.node.members.name(sender)!r} speaks of a pass that worker "
                f"{self.node.members.name(initiator)!r} began, who is not in "
                "this job."
            )
        with context.lock:
            participant = context.participants.get(pass_id)
            if participant is None:
                is_over = context.released or context.passes.is_over(pass_id)
                if is_over or initiator == self.node.info.id:
                    return None
                self._passes.charge(sender)
                participant = context.participants[pass_id] = Participant(self, context, pass_id)
                participant.brought_by = sender
        return participant

    def _takes_part(self, context_id: int, sender: int) -> bool:
        """Whether that worker called this one in a context, or was called by it. Who speaks of a
        pass did one or the other, and the call was read before; unless it makes the pass up."""
        context = self.container.find(context_id)
        return context is not None and sender in context.known_workers

    def post(self, context: Context, pass_id: int, post: Post) -> None:
        payload = encode(context.id, pass_id, post.message)
        self.node.post(post.to, TOPIC, payload, _scope(context, post.message))

    def ask(self, context: Context, pass_id: int, post: Post) -> Pending:
        """Send a message as a call, whose reply is what that worker says next."""
        payload = encode(context.id, pass_id, post.message)
        scope = _scope(context, post.message)
        pending: Pending = self.node.ask(post.to, TOPIC, payload, scope)
        return pending

    def counts(self) -> dict[str, int]:
        """How many contexts this worker holds and in how many passes it takes part."""
        parts = [p for context in self.container for p in list(context.participants.values())]
        return {
            "num_autograd_contexts": len(self.container),
            "num_current_backward_passes": sum(part.active for part in parts),
        }


def _scope(context: Context, message: Message) -> Scope | None:
    """Gradients are recorded like any tensors if they are to be differentiated; those that answer
    a message as well, so it is not only for messages that bring some."""
    if (type(message) is Gradient or type(message) is Begin) and message.options.create_graph:
        return context.recording
    return None


class OpenPass:
    """A pass whose local part is done by its initiator's own code, between `open_pass` and `close`.

    While it is open, the calling thread counts as one that runs the engine.
    """

    run: Run

    def __init__(self, service: Autograd, initiator: Initiator) -> None:
        self._service = service
        self._initiator = initiator

    @contextmanager
    def failing(self) -> Iterator[None]:
        """If the block fails, so does the pass, everywhere."""
        try:
            yield
        except BaseException as error:
            try:
                self._initiator.give_up(error)
            finally:
                self._over(failed=True)
            raise

    def close(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The local part is done and gave these gradients; returns when the pass is over."""
        failed = True
        try:
            self.run.done_by_caller(leaves, gradients)
            self._initiator.close()
            failed = False
        finally:
            self.run.close()
            self._over(failed)

    def _over(self, failed: bool) -> None:
        engine_thread.running = None
        self._service.pass_over(self._initiator.context, self._initiator.pass_id, failed)
