"""Autograd on one worker: its contexts, its passes, and what it says to the other workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from telegrad.autograd.answer import Answer
from telegrad.autograd.backward import Post
from telegrad.autograd.container import Census, Container
from telegrad.autograd.context import WORKER_SHIFT, Context, RecvRecord, Scope, worker_of
from telegrad.autograd.crossing import engine_thread
from telegrad.autograd.describe import DESCRIBE, Part, part_of
from telegrad.autograd.errors import AutogradError, ContextLost, UnknownContext
from telegrad.autograd.events import Abandon, Asked, Lost, Missed
from telegrad.autograd.initiator import Initiator
from telegrad.autograd.local import Run
from telegrad.autograd.messages import (
    TOPIC,
    Begin,
    Gradient,
    History,
    Message,
    Options,
    decode,
    encode,
)
from telegrad.autograd.participant import Participant
from telegrad.autograd.references import BACKWARD, backward_from, backward_on_owner
from telegrad.autograd.releases import Releases
from telegrad.rpc.calls import Pending, afresh
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.results import Finish, Later

TOPIC_RELEASE = "autograd.release"
TOPIC_HOLDER = "autograd.holder"
TOPIC_NEVER = "autograd.never"
STALL_TIME = 5.0
MOST_NAMED = 64
"""So many workers are named in a census as those that were told. Where they are more, some are told
twice: the names would cost more than that."""


class Autograd:
    """The autograd layer of one node."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.container = Container(
            node.info.id, ledger=node.ledger("contexts"), records=node.ledger("records")
        )
        self._passes = node.ledger("passes")
        self._releases = Releases(node.runtime, self._tell_census)
        self.stall_time = STALL_TIME
        first: int = (node.info.id << WORKER_SHIFT) + 1
        self.next_message = itertools.count(first).__next__
        node.on_post(TOPIC, self._on_pass_message)
        node.on_post(TOPIC_RELEASE, self._on_release)
        node.on_post(TOPIC_HOLDER, self._on_holder)
        node.on_post(TOPIC_NEVER, self._on_never)
        node.on_operation(TOPIC, self._on_asked)
        node.on_operation(BACKWARD, self._on_backward)
        node.on_operation(DESCRIBE, self._on_describe)
        node.on_lost(self._on_lost)

    # Contexts.

    def new_context(self) -> Context:
        return self.container.new()

    def release(self, context_id: int) -> None:
        """Let go of a context here, and on every worker that knows it."""
        context = self.container.release_own(context_id)
        if context is not None:
            # The flag before the look at the workers, as `leaving` looks after it has added one:
            # a message leaves either without a note or to a worker that is told.
            self._end(context, _released(context))
            self._releases.add(context, self.container.still_open)

    def end_earlier(self, context: Context) -> None:
        """The origin of a context has released all that it made before: hold nothing for those.

        They are not forgotten yet. That is up to the census, which will be passed on to those who
        know them.
        """
        for earlier in self.container.earlier(context):
            if not earlier.released:
                self._end(earlier, _released(earlier))

    def _on_describe(self, sender: int, context_id: int) -> Part | None:
        return part_of(self.container.find(_number(context_id)))

    def _tell_census(self, workers: set[int]) -> None:
        self._pass_on(self.container.census(), workers, set())

    def _on_release(self, sender: int, payload: tuple[Any, ...]) -> None:
        origin, version, newest = map(_number, payload[:3])
        census = Census(origin, version, newest, frozenset(map(_number, payload[3])))
        were_told = set(map(_number, payload[4]))
        told: set[int] = set()
        for context in self.container.learn(census, keep=self._may_be_worker(origin)):
            self._end(context, _released(context))
            told |= context.known_workers
        told.discard(sender)
        self._pass_on(census, told, were_told)

    def _may_be_worker(self, worker: int) -> bool:
        """Where others may lie, only those who are in the job are worth remembering."""
        if not self.node.data_only:
            return True
        try:
            self.node.members.member(worker)
        except TelegradError:
            return False
        return True

    def _pass_on(self, census: Census, workers: set[int], told: set[int]) -> None:
        """Tell a census to these workers, but for those that were told as it came here."""
        workers = workers - told - {self.node.info.id}
        told = (told | workers) if len(told) + len(workers) <= MOST_NAMED else set()
        payload = (census.origin, census.version, census.newest, (*census.live,), (*told,))
        for worker in sorted(workers):
            self.node.post(worker, TOPIC_RELEASE, payload)

    def _end(self, context: Context, error: TelegradError) -> None:
        context.let_go()
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
            self._end(context, self._lost_with(context.id, worker, reason))
        for context in self.container:
            if worker in context.known_workers and context.origin != self.node.info.id:
                self.node.post(context.origin, TOPIC_HOLDER, context.id)
            for participant in list(context.participants.values()):
                participant.deliver(self.node.info.id, Lost(worker, reason))

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

    def _on_holder(self, sender: int, context_id: int) -> None:
        """A worker holds a context of ours and lost one through whom it might have been told."""
        context = self.container.find(_number(context_id))
        if self.container.was_never_made(context_id):
            self.node.post(sender, TOPIC_NEVER, context_id)
        if context is not None:
            context.know(sender)
        if context is None or context.released:
            self._tell_census({sender})

    def _on_never(self, sender: int, context_id: int) -> None:
        """Somebody spoke in the name of a worker, which knows nothing of it."""
        if worker_of(_number(context_id)) == sender:
            for context in self.container.forget(context_id):
                self._end(
                    context,
                    AutogradError(
                        f"Context {context.id} was never made by the worker that it names."
                    ),
                )

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
        with context.lock:
            bound = context.passes.own_over(pass_id, failed)
        self._forget_below(context, bound, ())

    def backward_from(self, rref: Any, context_id: int, retain_graph: bool) -> None:
        """`RRef.backward`."""
        backward_from(self, rref, context_id, bool(retain_graph))

    def _on_backward(
        self, sender: int, reference: Any, context_id: int, retain_graph: bool
    ) -> None:
        named = ReferenceId(*map(_number, reference))
        backward_on_owner(self, named, _number(context_id), bool(retain_graph))

    def learn(self, context: Context, history: History) -> None:
        """A message told which earlier passes of its initiator are over."""
        if history.over_below:
            self._forget_below(context, history.over_below, history.failed)

    def _forget_below(self, context: Context, bound: int, failed: Sequence[int]) -> None:
        with context.lock:
            if not context.passes.over_below(bound):
                return
            gone: list[Participant] = []
            for pass_id in list(context.participants):
                if context.passes.is_over(pass_id):
                    gone.append(context.participants.pop(pass_id))
        for pass_id in failed:
            context.discard(pass_id)
        for participant in gone:
            self._let_go_of(participant)
            if not participant.idle:
                participant.deliver(self.node.info.id, Abandon(AutogradError("The pass is over.")))
        context.commit(context.passes.is_over)

    def missed(self, context: Context, passes: list[int], record: RecvRecord) -> None:
        """A message arrived after these passes began here, and before they did at its sender."""
        for pass_id in passes:
            participant = context.participants.get(pass_id)
            if participant is not None:
                participant.deliver(record.peer, Missed(record))

    def _on_pass_message(self, sender: int, payload: Any) -> None:
        context_id, pass_id, message = decode(payload)
        participant = self._participant(context_id, pass_id, sender)
        if participant is not None:
            participant.deliver(sender, message)

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
        # A message of a pass may overtake the call that would have brought its context here.
        context = self.container.join(context_id, sender)
        if context is None:
            return None
        initiator = worker_of(pass_id)
        if pass_id not in context.participants and not self._may_be_worker(initiator):
            raise AutogradError(
                f"Worker {sender} speaks of a pass that worker {initiator} began, who is not in "
                "this job."
            )
        with context.lock:
            if context.released or context.passes.is_over(pass_id):
                return None
            participant = context.participants.get(pass_id)
            if participant is None:
                if initiator == self.node.info.id:
                    return None
                self._passes.charge(sender)
                participant = context.participants[pass_id] = Participant(self, context, pass_id)
                participant.brought_by = sender
        return participant

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


def _released(context: Context) -> AutogradError:
    return AutogradError(f"Context {context.id} was released during backward.")


def _number(value: Any) -> int:
    """What others send as a number is one: other values may take for ever to hash or to show."""
    if type(value) is not int:
        raise AutogradError(f"A message holds a {type(value).__name__} where a number has to be.")
    return value


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
            self._over(failed)

    def _over(self, failed: bool) -> None:
        engine_thread.running = None
        self._service.pass_over(self._initiator.context, self._initiator.pass_id, failed)
