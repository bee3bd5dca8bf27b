"""Drives one worker's part of one pass: joins the core (`backward`) and the engine (`local`).

There is no thread of its own. Whoever brings an event while nobody drives becomes the driver: it
handles the event, runs the engine as far as it goes, and leaves. Events that come while someone
drives are put in the inbox; the driver takes them when it is done, or from inside the engine, where
it waits for just that. On the worker where `backward` was called its caller drives first (see
`initiator`).

Only the driver touches the core and the run, so neither needs a lock. The inbox has one. Waiting
is rare, so the condition to wait on is made by who waits first, before it looks at what it waits
for; who changes that looks for the condition afterwards. So nobody is left asleep.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from telegrad.autograd.answer import Answer
from telegrad.autograd.backward import (
    Part,
    Post,
    check_gradients,
    fit,
    merge_ack,
)
from telegrad.autograd.context import (
    Context,
    RecvRecord,
    SendRecord,
    begin_work_in,
    end_work,
    worker_of,
)
from telegrad.autograd.enclosed import EnclosedSend
from telegrad.autograd.errors import AutogradError, BadGradient, UnusedResult
from telegrad.autograd.events import (
    Abandon,
    Asked,
    Event,
    Lost,
    Missed,
    Stalled,
    Stopped,
    TakenBack,
    Unread,
)
from telegrad.autograd.leaves import Gradients, apart_from_leaves
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
    encode,
)
from telegrad.autograd.plan import ROOTS, Source, State
from telegrad.autograd.sequels import Follower
from telegrad.rpc.errors import CallTimeout, WorkerLost
from telegrad.rpc.runtime import Condition

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

FEW = 64
"""Events that may wait for the driver in any case."""
PATIENCE = 1.0
"""Seconds that an engine call waits for a gradient before it gives its thread back."""


class Abandoned(Exception):
    """Leaves an engine call of a pass that has failed."""


class Participant:
    """One worker's part of one pass of one context."""

    # What few passes need is set when they do.
    _condition: Condition | None = None
    _driving = False
    _part: Part | None = None
    _run: Run | None = None
    _partners: frozenset[int] = frozenset()
    _recvs: Mapping[int, RecvRecord] = MappingProxyType({})
    _early: tuple[tuple[int, Absent], ...] = ()
    _resolved = 0
    _answer: Answer | None = None
    _deadline = math.inf
    _timeout: float | None = None
    _follower: Follower | None = None
    """Who is to be called before this part may be reported as ended."""
    brought_by: int | None = None
    """The worker that spoke of the pass first; None where it was initiated."""
    active = False
    """The local part has begun and not ended."""

    def __init__(self, service: Autograd, context: Context, pass_id: int) -> None:
        self.context = context
        self.pass_id = pass_id
        self._service = service
        self._node = node = service.node
        self._worker: int = node.info.id
        self._lock = threading.Lock()
        self._inbox: list[tuple[int, Event]] = []
        self._held: list[Post] = []

    @property
    def idle(self) -> bool:
        """Nothing is going on here that anyone would have to be told to stop."""
        part = self._part
        return not self._driving and part is not None and part.ended

    def deliver(self, sender: int, event: Event) -> None:
        """Something happened. If nobody drives, the calling thread does."""
        with self._lock:
            drives = not self._driving
            if drives:
                self._driving = True
            elif sender != self._worker and len(self._inbox) > self._most_waiting():
                raise AutogradError(
                    f"Worker {self._name(sender)} says more in a pass of context "
                    f"{self.context.id} than there is to say."
                )
            else:
                self._inbox.append((sender, event))
        if drives:
            self._drive(((sender, event),))
        else:
            self._wake()

    def _most_waiting(self) -> int:
        """Each send is answered once, and each partner begins, acknowledges and fails once."""
        return FEW + 4 * (len(self.context.sends) + len(self.context.recvs))

    def _drive(self, batch: Sequence[tuple[int, Event]] = ()) -> None:
        """Handle these events and all that come meanwhile. The caller has set `_driving`."""
        while True:
            if batch:
                try:
                    self._handle_all(batch)
                    self._advance()
                except BaseException as error:
                    # A gradient that cannot be sent, or Ctrl-C: without this nobody could ever
                    # drive again, and no one would be told.
                    self._fail(error)
                self._clean_up()
            with self._lock:
                if not self._inbox:
                    self._driving = False
                    break
                batch, self._inbox = self._inbox, []
        if self._condition is not None:
            self._wake()

    # Waiting.

    def _about_to_wait(self) -> None:
        self._node.transport.blocking()

    def _patience_ends(self, part: Part) -> float:
        return self._node.runtime.now() + self._service.stall_time if part.muted else math.inf

    def _too_late(self) -> CallTimeout:
        partners = sorted(map(self._node.members.name, self._partners))
        return CallTimeout(
            f"backward in context {self.context.id} did not end in {self._timeout} s. It waits "
            f"for the workers {partners}."
        )

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

    def _next(self, timeout: float | None) -> list[tuple[int, Event]]:
        """The events that came; none if the time is up."""
        if not self._inbox:
            self._about_to_wait()
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

    def _answer_of(self, worker: int, until: float) -> Sequence[tuple[int, Event]]:
        """What a worker says that was asked, if any was."""
        return ()

    # Outlet of the run: called from inside the engine, or right after it if the run is brief.

    def gradient(self, message: int, gradients: Sequence[Tensor | None]) -> None:
        assert self._part is not None
        assert self._run is not None
        if self._part.options.sequel is not None:
            gradients = apart_from_leaves(gradients)
        peer = self._recvs[message].peer
        posts = self._part.gradient(peer, message, gradients)
        if self._run.brief and self._waits_for_the_rest(self._part, peer):
            self._held += posts
        else:
            self._send_from_engine(posts)

    def _waits_for_the_rest(self, part: Part, peer: int) -> bool:
        """Whether a gradient of a brief run leaves when all is done: the one for the parent can
        carry the acknowledgement then. The others leave at once, as their workers wait for them."""
        return part.owes(peer)

    def _send_from_engine(self, posts: list[Post]) -> None:
        self._send(posts)

    def absent(self, message: int) -> None:
        assert self._part is not None
        self._part.absent(self._recvs[message].peer, message)

    def wait(self, source: Source) -> None:
        part = self._part
        assert part is not None
        posts, self._held = self._held, []
        self._send(posts)
        before = self._resolved
        while self._resolved == before:
            # What came meanwhile may have to be told of as well: a result that nobody uses.
            self._send(part.rest(self._partners))
            batch = self._next(PATIENCE)
            if not batch:
                return
            self._handle_all(batch)
            if part.failure is not None:
                raise Abandoned

    def wait_enclosed(self, source: Source) -> None:
        part = self._part
        assert part is not None
        assert source.record is not None
        # Only this worker is waited for; whom it waits for itself, it tells.
        worker = source.record.peer
        self._send(part.rest((worker,)))
        runtime = self._node.runtime
        while source.state is State.PENDING:
            until = min(self._deadline, self._patience_ends(part))
            batch = self._answer_of(worker, until)
            if not batch:
                batch = self._next(None if until == math.inf else until - runtime.now())
            self._handle_all(batch)
            if part.failure is not None:
                raise Abandoned
            if runtime.now() >= self._deadline:
                raise self._too_late()
            if not batch:
                self._send(part.probe(self._partners))

    # Events.

    def _handle_all(self, batch: Sequence[tuple[int, Event]]) -> None:
        for sender, event in batch:
            try:
                self._handle(sender, event)
            except Exception as error:
                self._fail(error)

    def _handle(self, sender: int, event: Event) -> None:
        if type(event) is Asked:
            if self._answer is not None:
                self._answer_empty()
            self._answer, event = event.answer, event.message
        if type(event) is Gradient:
            self._handle_gradient(sender, event)
        else:
            self._handle_other(sender, event)
        if self._answer is not None:
            part = self._part
            if part is not None and part.failure is None and not part.owes(self._answer.asker):
                self._answer_empty()

    def _handle_gradient(self, sender: int, event: Gradient) -> None:
        options, history, engages, message, gradients, acknowledges = event
        if history.over_below:
            self._learn(sender, history)
        part = self._part or self._join(options, history)
        if part.failure is not None:
            return
        if not engages:
            part.overtook(sender)
        elif answer := part.engage(sender):
            self._send(answer)
        self._resolve(part, sender, message, gradients)
        if acknowledges:
            part.acknowledged()

    def _handle_other(self, sender: int, event: Event) -> None:
        if type(event) is Begin:
            if event.history.over_below:
                self._learn(sender, event.history)
            if self._part is None:
                self._join(event.options, event.history)
        part = self._part
        if part is None:
            self._handle_outside(sender, event)
        elif part.failure is None:
            self._handle_inside(part, sender, event)

    def _learn(self, sender: int, history: History) -> None:
        if worker_of(history.over_below) != worker_of(self.pass_id):
            raise AutogradError(
                f"Worker {self._name(sender)} tells in pass {self.pass_id} of passes that another "
                "worker began."
            )
        self._service.learn(self.context, history)

    def _handle_outside(self, sender: int, event: Event) -> None:
        """Nothing has engaged this worker in the pass so far."""
        match event:
            case Absent():
                if len(self._early) > self._most_waiting():
                    raise AutogradError(
                        f"Worker {self._name(sender)} says more often that gradients are absent "
                        f"in a pass of context {self.context.id} than there are messages."
                    )
                self._early = (*self._early, (sender, event))
            case Fail(failure):
                self._flood(failure, sender)

    def _handle_inside(self, part: Part, sender: int, event: Event) -> None:
        match event:
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
            case TakenBack(message):
                self._forget_source(part, message)
            case Unread(worker, reason):
                if part.depends_on(worker, self._partners):
                    raise AutogradError(
                        f"A message of worker {self._node.members.name(worker)!r} was not taken, "
                        f"and the backward pass of context {self.context.id} needs it: {reason}."
                    )
            case Abandon(error):
                self._abandon(part, error)
            case Stalled():
                self._send(part.probe(self._partners))
            case Stopped(error):
                self._fail(error)

    def _name(self, worker: int) -> str:
        return repr(self._node.members.name(worker))

    def _lost_error(self, worker: int, reason: str) -> WorkerLost:
        name = self._node.members.name(worker)
        return WorkerLost.saying(
            f"Worker {name!r} ({worker}) is gone, the backward pass needs it: {reason}.",
            name,
            reason,
            f"the backward pass of context {self.context.id}",
        )

    def _join(self, options: Options, history: History, roots: Source | None = None) -> Part:
        context, worker = self.context, self._worker
        part = self._part = Part(worker, worker_of(self.pass_id), options, history)
        self.active = True
        sends, self._recvs, self._partners = context.snapshot(self.pass_id)
        if worker in self._partners:
            self._partners -= {worker}
        sources = {} if roots is None else {ROOTS: roots}
        for record in sends:
            sources[record.message] = Source(record.message, record.start, record)
        if context.released:
            raise AutogradError(f"Context {context.id} was released during backward.")
        if self._node.has_losses:
            self._check_partners()
        self._run = Run(sources, self._recvs, self, options, context.enclosures)
        if self._early:
            self._resolve_early(part)
        return part

    def _check_partners(self) -> None:
        lost = self._node.lost_workers()
        gone = min(self._partners.intersection(lost), default=None)
        if gone is not None:
            raise self._lost_error(gone, lost[gone])

    def _resolve_early(self, part: Part) -> None:
        """Absences that were told before anything engaged this worker."""
        early, self._early = self._early, ()
        for sender, event in early:
            for message in event.messages:
                self._resolve(part, sender, message, None)

    def _resolve(
        self, part: Part, sender: int, message: int, gradients: Sequence[Tensor | None] | None
    ) -> None:
        if self._run is None:
            return
        source = self._run.sources.get(message)
        if source is None or message == ROOTS:
            if message not in self.context.sends:
                raise BadGradient(
                    f"Worker {self._name(sender)} sent gradients for message {message}, which "
                    f"worker {self._name(self._worker)} never sent in context {self.context.id}."
                )
            return  # Sent after the pass began here: it does not take part.
        record = source.record
        assert record is not None
        if not fit(record, sender, gradients):
            check_gradients(record, sender, gradients, self._name)
        if source.state is not State.PENDING:
            raise BadGradient(
                f"The gradients of message {message}, sent to worker {self._name(record.peer)}, "
                "came twice."
            )
        if gradients is None and part.options.mode is Mode.FAST:
            raise self._unused(record)
        self._run.resolve(source, gradients)
        self._resolved += 1

    def _forget_source(self, part: Part, message: int) -> None:
        """A message never reached its worker: no gradient can come for it."""
        source = None if self._run is None else self._run.sources.get(message)
        if source is None or part.complete or source.state is not State.PENDING:
            return
        assert self._run is not None
        self._run.resolve(source, None)
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

    def _advance(self) -> None:
        """Run the engine as far as it goes, and send what came of it."""
        run = self._run  # If it ends now, it goes when others have been told what it found.
        self._send(self._progress())
        del run
        if self._follower is not None:
            self._follow()

    def _progress(self) -> list[Post]:
        """Run the engine as far as it goes; what is to be sent then."""
        part, run = self._part, self._run
        if part is None or part.failure is not None:
            return []
        try:
            if run is not None and not part.complete:
                self._run_engine(run, part)
        except Abandoned:
            return []
        except BaseException as error:
            self._fail(error)
            return []
        posts = part.rest(self._partners)
        if self._held:
            posts, self._held = self._held + posts, []
        if self._follower is None:
            return merge_ack(posts, part.report())
        if self._follower.brief:
            # What goes to the parent can soon carry the acknowledgement as well.
            assert run is not None
            self._held = [_unlike(run.gradients, post) for post in posts if part.owes(post.to)]
            posts = [post for post in posts if not part.owes(post.to)]
        return posts

    def _run_engine(self, run: Run, part: Part) -> None:
        outside = begin_work_in(self.context)
        try:
            if not run.step():
                return
        finally:
            end_work(outside)
        self.context.keep(self.pass_id, run.gradients)
        # The run knows this participant. As a cycle the two would keep the gradients until the
        # garbage collector comes by, which is steps of training later.
        self._run = None
        if part.options.sequel is not None:
            self._follower = self._service.follower(self.pass_id, part.options.sequel)
        if self._follower is None:
            part.complete = True
            self._retire()

    def _follow(self) -> None:
        """Have done what follows the pass here, and report that this part has ended."""
        part, follower = self._part, self._follower
        assert part is not None
        assert follower is not None
        assert part.options.sequel is not None
        self._follower = None
        # It may have been said meanwhile that the pass has failed. Who heard of it elsewhere may
        # already put back what the sequel would change.
        with self._lock:
            batch, self._inbox = self._inbox, []
        self._handle_all(batch)
        if part.failure is not None:
            return
        try:
            follower.follow(self.context, part.options.sequel.data)
        except BaseException as error:
            self._fail(error)
            return
        part.complete = True
        self._retire()
        posts, self._held = self._held, []
        self._send(merge_ack(posts, part.report()))

    def _send(self, posts: list[Post]) -> None:
        answer = self._answer
        for post in posts:
            if answer is not None and answer.asker == post.to:
                self._answer = None
                answer.give(encode(self.context.id, self.pass_id, post.message))
                answer = None
            else:
                self._service.post(self.context, self.pass_id, post)

    def _answer_empty(self) -> None:
        """Let go of who asked: nothing will come, or not as an answer."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.give()

    # Ending.

    def _fail(self, error: BaseException) -> None:
        if self._part is not None and self._part.failure is not None:
            return
        self._remember(error)
        self._flood(Failure.of(error, self._worker, self._node.info.name), None)

    def _remember(self, error: BaseException) -> None:
        """Nobody raises it here, and its traceback would hold the graph."""

    def _flood(self, failure: Failure, sender: int | None) -> None:
        if self._part is None:
            self._part = Part(self._worker, worker_of(self.pass_id), Options(), History())
        audience = self._partners | self.context.partners()
        self._send(self._part.fail(failure, audience, sender))
        self.context.discard(self.pass_id)

    def _abandon(self, part: Part, error: BaseException) -> None:
        if not part.ended:
            part.fail(Failure.of(error, self._worker, self._node.info.name), (), None)
            self._remember(error)

    def _clean_up(self) -> None:
        if self._part is not None and self._part.failure is not None:
            self._answer_empty()
            if self._run is not None:
                self._run.close()
            self._run = self._follower = None
            self._held = []
            self._retire()

    def _retire(self) -> None:
        self._recvs = {}
        self.active = False


def _unlike(found: Gradients, post: Post) -> Post:
    """A message that stays as it is while the gradients that were found here are changed in place:
    the engine may give one tensor to a leaf and to another worker, as for `x + weight`."""
    to, message = post
    if type(message) is not Gradient or not any(map(found.has, message.gradients)):
        return post
    apart = [None if each is None else each.detach().clone() for each in message.gradients]
    return Post(to, message._replace(gradients=apart))
