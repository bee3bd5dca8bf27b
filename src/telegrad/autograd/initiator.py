"""The worker where `backward` was called: its caller drives first, and then waits for the end.

What comes while it waits is handled by the thread that reads it, without waking anyone, until the
pass is over. One answer the caller reads itself (see `answer`): that of the worker that it engaged
last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from telegrad.autograd.backward import Part, engages
from telegrad.autograd.errors import PassFailed
from telegrad.autograd.events import Event, Stalled, Stopped
from telegrad.autograd.local import Run
from telegrad.autograd.messages import History, Options, decode
from telegrad.autograd.participant import Abandoned, Participant
from telegrad.autograd.plan import ROOTS, Edge, Source, State
from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import RemoteTraceback


class Initiator(Participant):
    """The part of the worker that began the pass. It is driven from the start."""

    _driving = True
    _error: BaseException | None = None
    _pending: Pending | None = None
    _unread: Pending | None = None
    """The same, until it is settled who reads the answer."""

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
            part = self._join(options, history, (_root_source(roots),))
            self._advance_and_ask()
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
            self._join(options, history, (_root_source(roots),))
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

    def _about_to_wait(self) -> None:
        """The caller of `backward` drives, and waits for what the answer may bring: it cannot read
        it as well."""
        unread = self._take_unread()
        if unread is not None:

            def read() -> None:
                try:
                    self._deliver_answer(unread)
                except BaseException as error:
                    self.deliver(self._worker, Stopped(error))

            self._node.when_settled(unread, read)
        super()._about_to_wait()

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
            raise PassFailed(
                f"Error on Node {failure.worker}: {failure.message}"
            ) from RemoteTraceback(failure.worker_name, failure.traceback)

    def _remember(self, error: BaseException) -> None:
        self._error = error

    # The worker that is asked.

    def _advance_and_ask(self) -> None:
        """As `_advance`; but afterwards the calling thread only waits, so it may ask."""
        posts = self._progress()
        for place in reversed(range(len(posts))):
            if engages(posts[place].message):
                self._send(posts[:place])
                asked = self._service.ask(self.context, self.pass_id, posts[place])
                self._pending = self._unread = asked
                posts = posts[place + 1 :]
                break
        self._send(posts)

    def _drive(self, batch: Sequence[tuple[int, Event]] = ()) -> None:
        super()._drive(batch)
        if self._pending is not None:
            part = self._part
            if part is not None and (part.ended or part.failure is not None):
                self._node.drop(self._pending)


def _root_source(roots: Sequence[Tensor]) -> Source:
    edges: list[Edge] = []
    gradients: list[Tensor] = []
    for root in roots:
        edges.append((root.grad_fn, root.output_nr))
        gradients.append(torch.ones_like(root))
    return Source(ROOTS, edges, None, State.GRADIENT, gradients)
