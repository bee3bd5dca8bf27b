"""The worker where `backward` was called: its caller drives first, and then waits for the end.

What comes while it waits is handled by the thread that reads it, without waking anyone, until the
pass is over. One answer the caller reads itself (see `answer`), that of the worker to which it sent
its last message; it drives with what that brings, and asks again. Where calls were made inside of
nodes (see `enclosed`), it asks each worker that it engages from there, and reads the answers that
those nodes wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.autograd.backward import Part, Post, calls_for_answer, engages
from telegrad.autograd.context import Context
from telegrad.autograd.enclosed import Enclosure
from telegrad.autograd.errors import PassFailed, PassLost
from telegrad.autograd.events import Event, Stalled, Stopped
from telegrad.autograd.local import Run
from telegrad.autograd.messages import Failure, History, Message, Options, decode
from telegrad.autograd.participant import Abandoned, Participant
from telegrad.autograd.plan import ROOTS, Edge, Source, State
from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import RemoteTraceback

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

GLANCE = 0.05
"""Seconds after which one who reads an answer looks for what others have brought."""


class Initiator(Participant):
    """The part of the worker that began the pass. It is driven from the start."""

    _driving = True
    _error: BaseException | None = None

    def __init__(self, service: Autograd, context: Context, pass_id: int) -> None:
        super().__init__(service, context, pass_id)
        self._asker = 0
        """The thread of the caller while it drives and will read the answer thereafter."""
        self._asked: list[Pending] = []
        self._unread: dict[int, Pending] = {}
        """The same by worker, until it is settled who reads the answer."""

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
            part = self._join(options, history, _root_source(roots))
            self._advance_and_ask()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._clean_up()
            self._drive()
        self._see_through(part)

    def open(self, options: Options, history: History, timeout: float | None = None) -> Run:
        """Begin a pass whose local part is done by the caller, who works with the run."""
        if timeout is not None:
            self._timeout, self._deadline = timeout, self._node.runtime.now() + timeout
        try:
            self._join(options, history, _enclosed_source(self.context.enclosures))
        except BaseException as error:
            self.give_up(error)
            raise
        assert self._run is not None
        return self._run

    def close(self) -> None:
        """The caller has done the local part: run what is left, and see the pass through."""
        part = self._part
        assert part is not None
        self._advance_and_ask()
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
        # The caller raises it. Its traceback knows the frames that keep this context.
        self._error = None

    def _see_through(self, part: Part) -> None:
        """The caller of `backward` has done its share: wait for the end, and say how it was."""
        try:
            while unread := self._take_unread():
                if len(unread) > 1:
                    self._let_others_read(unread[:-1])
                self._await_answer(part, unread[-1])
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
        self._asker = get_ident()
        try:
            self._deliver_answer(pending)
        finally:
            self._asker = 0

    def _deliver_answer(self, pending: Pending) -> None:
        for message in self._said(pending):
            self.deliver(pending.callee.id, message)

    def _said(self, pending: Pending) -> list[Message]:
        """What a worker that was asked has answered, if it had anything to say."""
        node = self._node
        if pending.frame is None and (pending.error is None or node.is_lost(pending.callee.id)):
            return []  # The pass has ended without it, or is about to.
        payload = node.outcome(pending)
        return [] if payload is None else [decode(payload)[2]]

    def _take_unread(self) -> list[Pending]:
        if not self._unread:
            return []
        with self._lock:
            unread, self._unread = list(self._unread.values()), {}
        return unread

    def _about_to_wait(self) -> None:
        self._let_others_read(self._take_unread())
        super()._about_to_wait()

    def _let_others_read(self, unread: Sequence[Pending]) -> None:
        """The caller of `backward` drives, or reads another answer, and waits for what these may
        bring: it cannot read them as well."""

        def read(pending: Pending) -> None:
            try:
                self._deliver_answer(pending)
            except BaseException as error:
                self.deliver(self._worker, Stopped(error))

        for pending in unread:
            self._node.when_settled(pending, partial(read, pending))

    def _answer_of(self, worker: int, until: float) -> Sequence[tuple[int, Event]]:
        """What a worker says that was asked: read on this thread, which waits for nothing else.

        Meanwhile others may bring what somebody waits for, so it looks for that now and then.
        """
        with self._lock:
            pending = self._unread.pop(worker, None)
        if pending is None:
            return ()
        node = self._node
        while not (pending.done or self._inbox) and (now := node.runtime.now()) < until:
            node.transport.wait(pending, min(until, now + GLANCE))
        if pending.done:
            return [(worker, message) for message in self._said(pending)]
        with self._lock:
            self._unread[worker] = pending
            batch, self._inbox = self._inbox, []
        return batch

    def _await_end(self, part: Part) -> None:
        """Wait while those who bring messages drive."""
        if part.ended and not self._driving:
            return
        runtime = self._node.runtime
        while not self._has_ended(part, min(self._deadline, self._patience_ends(part))):
            if runtime.now() >= self._deadline:
                raise self._too_late()
            self.deliver(self._worker, Stalled())

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
            raise self._failed(failure) from RemoteTraceback(failure.worker_name, failure.traceback)

    def _failed(self, failure: Failure) -> PassFailed:
        text = f"Error on Node {failure.worker}: {failure.message}"
        if not failure.lost:
            failed = PassFailed(text)
            failed.worker = failure.worker_name
            return failed
        pending = f"the backward pass of context {self.context.id}"
        return PassLost.saying(text, failure.lost, failure.cause, pending)

    def _remember(self, error: BaseException) -> None:
        self._error = error

    # The worker that is asked.

    def _advance(self) -> None:
        if self._asker == get_ident():
            self._advance_and_ask()
        else:
            super()._advance()

    def _advance_and_ask(self) -> None:
        """As `_advance`; but afterwards the calling thread only waits, so it may ask."""
        posts = self._progress()
        asking = len(posts) - 1
        while asking >= 0 and not calls_for_answer(posts[asking].message):
            asking -= 1
        for place, post in enumerate(posts):
            if place == asking:
                self._ask(post)
            else:
                self._send([post])
        if self._follower is not None:
            self._follow()

    def _waits_for_the_rest(self, part: Part, peer: int) -> bool:
        # The last one is asked, and nobody asks from inside of the engine.
        return True

    def _send_from_engine(self, posts: list[Post]) -> None:
        """Where nodes make calls, they will then wait for what these messages bring back."""
        for post in posts:
            if self.context.enclosures and engages(post.message):
                self._ask(post)
            else:
                self._send([post])

    def _ask(self, post: Post) -> None:
        pending = self._service.ask(self.context, self.pass_id, post)
        self._asked.append(pending)
        with self._lock:
            earlier = self._unread.get(post.to)
            self._unread[post.to] = pending
        if earlier is not None:
            # It may have been answered before that worker was asked again.
            self._let_others_read((earlier,))

    def _drive(self, batch: Sequence[tuple[int, Event]] = ()) -> None:
        super()._drive(batch)
        part = self._part
        if self._asked and part is not None and (part.ended or part.failure is not None):
            for pending in self._asked:
                if not pending.done:
                    self._node.drop(pending)


def _root_source(roots: Sequence[Tensor]) -> Source:
    edges: list[Edge] = []
    gradients: list[Tensor] = []
    for root in roots:
        edges.append((root.grad_fn, root.output_nr))
        gradients.append(torch.ones_like(root))
    return Source(ROOTS, edges, None, State.GRADIENT, gradients)


_ZERO = torch.zeros(())


def _enclosed_source(enclosures: Sequence[Enclosure]) -> Source:
    """The roots of a caller that does the local part: all of it is in its enclosures."""
    source = Source(ROOTS, [(enclosure.leaf, 0) for enclosure in enclosures])
    source.state = State.GRADIENT
    source.gradients = [_ZERO] * len(enclosures)
    return source
