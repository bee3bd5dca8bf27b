"""One worker: it makes calls, runs the calls of others, and keeps what they refer to.

A node knows its transport and its runtime only by their interfaces: `agent.py` gives it sockets and
threads, `telegrad.testing` a simulated network. Nothing here blocks but through them.

A request is run by the thread that the transport brings it on. It ends in one of three ways: with a
`Reply` that the transport sends at once; later, when a future, a coroutine or a value that is still
being made is ready; or, for posts, without an answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from telegrad.rpc.calls import Calls, Late, Pending, afresh, kind_of, without_frames
from telegrad.rpc.closing import CLOSING
from telegrad.rpc.coroutines import Coroutines
from telegrad.rpc.crossing import Crossing, NoCrossing, Scope
from telegrad.rpc.current import not_initialized
from telegrad.rpc.errors import (
    JobClosed,
    Refused,
    RemoteError,
    TelegradError,
    WorkerLost,
)
from telegrad.rpc.failures import (
    describe_error,
    in_brief,
    rebuild_error,
    report_background_error,
    told_error,
)
from telegrad.rpc.limits import Ledger, Limits, default_limits
from telegrad.rpc.members import Members
from telegrad.rpc.passage import Passages
from telegrad.rpc.relays import Relays
from telegrad.rpc.results import Later, as_result
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.tally import Tally
from telegrad.rpc.transport import Reply, Transport
from telegrad.rpc.value_requests import ValueRequests
from telegrad.rpc.values import Values
from telegrad.rpc.wording import of_call, of_result
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.codec import Packed, Trust, is_exported, pack, unpack
from telegrad.wire.errors import CodecError, Unpackable
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.parcel import Parcel

DEFAULT_TIMEOUT = 60.0
LIVENESS = 5.0


class Node:
    """One worker's state and protocols, over any transport."""

    def __init__(
        self,
        info: WorkerInfo,
        members: Members,
        runtime: Runtime,
        *,
        crossing: Crossing | None = None,
        trust: Trust = Trust.CODE,
        limits: Limits | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        liveness: float = LIVENESS,
    ) -> None:
        self.info = info
        self.members = members
        self.runtime = runtime
        self.crossing: Crossing = crossing or _default_crossing
        self.trust = trust
        self.data_only = trust is Trust.DATA
        self.limits = limits or default_limits(trust)
        self._codec_limits = self.limits.of_codec()
        self._usual_limits = self.limits == default_limits(Trust.CODE)
        self.timeout = timeout
        self.liveness = liveness
        self.calls = Calls()
        self.services: dict[str, Any] = {}
        self.transport: Transport
        self.closed = False
        self.none_returns: str | None = None
        """Why a lost worker is not started anew, where that was to be expected."""
        self.passages = Passages(self)
        self.served = 0
        """The kind of what was asked for last: when the next request comes depends on it."""
        self._topics: dict[str, Callable[[int, Any], object]] = {}
        self._operations: dict[str, Callable[..., object]] = {}
        self.around_calls: Callable[[int], AbstractContextManager[None]] | None = None
        """What a layer above does around calls of a worker that belong to no scope."""
        self._lost_callbacks: list[Callable[[int, str], object]] = []
        self._closed_callbacks: list[Callable[[], object]] = []
        self._unread_callbacks: list[Callable[[int, Frame, str], object]] = []
        self._lost: dict[int, str] = {}
        self.has_losses = False
        """Whether any worker is lost."""
        self.coroutines = Coroutines()
        self._made = Tally()
        self._finished = Tally()
        self.values = Values(self)
        self.relays = Relays(self, ValueRequests(self).invoke)
        for name, factory in _services.items():
            self.services[name] = factory(self)

    def ledger(self, kind: str) -> Ledger:
        """The account of what is kept here for others that one of the limits bounds."""
        return Ledger(kind, getattr(self.limits, kind), self.info.name, self.members.name)

    # Calling.

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
        """Begin a call. `target` is a callable, or the name of one of the node's own operations.

        `on_settled` runs once, on any thread that may run user code, when the outcome is there.
        `written` is the message, if it was written before or needs no tree. With `leaving` the call
        is only made ready, and leaves when what is added to that list is called. `on_late` is told
        the end of a call that its deadline has settled, if there is one while that worker lives.
        """
        if self.closed:
            raise not_initialized()
        if timeout is None:
            timeout = self.timeout
        elif not isinstance(timeout, float | int) or timeout is True or not timeout >= 0:
            raise ValueError(
                f"timeout={timeout!r} is no time: give seconds, 0 for no bound, None for the job's"
            )
        request = (target, args, kwargs or {}) if written is None else written
        scope = self.crossing.current()
        return self._begin(to, target, request, scope, timeout, on_settled, leaving, on_late)

    def ask(self, to: int, operation: str, payload: object, scope: Scope | None) -> Pending:
        """Begin a call of one of the other node's own operations, under a scope of its own.

        A parcel for that operation travels as it is.
        """
        if self.closed:
            raise not_initialized()
        request = payload if type(payload) is Parcel else (operation, (payload,), {})
        return self._begin(self.members.member(to).info, operation, request, scope, 0)

    def _begin(
        self,
        to: WorkerInfo,
        target: object,
        request: tuple[object, ...],
        scope: Scope | None,
        timeout: float,
        on_settled: Callable[[Pending], None] | None = None,
        leaving: list[Callable[[], None]] | None = None,
        on_late: Late | None = None,
    ) -> Pending:
        worker = to.id
        try:
            packed, note = self._prepare(request, worker, scope)
        except Unpackable as problem:
            raise of_call(problem, request, to.name) from problem.__cause__
        pending = self.calls.begin(to, target, timeout, self.runtime.now())
        if self.values.journey.leaving:
            pending.carried = self.values.packed()
        if note:
            pending.note = note
        if on_late is not None:
            pending.late = on_late
        if target != CLOSING:
            self._made.add(worker)
        if on_settled is not None:
            pending.completion.append(lambda: on_settled(pending))
        if worker in self._lost:
            self._settle_lost(pending)
        elif leaving is not None:
            leaving.append(partial(self.transport.call, pending, packed, note))
        else:
            self.transport.call(pending, packed, note)
        return pending

    def wait(self, pending: Pending) -> Any:
        """The result of a call, or its error."""
        if not pending.done:
            try:
                self.transport.wait(pending)
            except BaseException:
                self.abandon(pending)
                raise
        return self.outcome(pending)

    def abandon(self, pending: Pending) -> None:
        """Its only caller was interrupted: what the answer refers to has to be let go all the same,
        when it comes or if it is here."""
        self.drop(pending)
        frame = pending.frame
        if frame is not None:
            self.runtime.spawn(partial(self.discard, pending.callee.id, frame))

    def drop(self, pending: Pending) -> None:
        """Nobody wants the answer any more: who waits for it is let go, with neither."""
        if self.calls.take(pending.callee.id, pending.call_id) is not None:
            pending.completion.clear()
            pending.settle(None)

    def when_settled(self, pending: Pending, work: Callable[[], None]) -> None:
        """Do that when the call is settled, although nobody waits for it."""
        pending.completion.append(work)
        if pending.done:
            pending.complete()
        else:
            self.transport.attend(pending)

    def request(self, to: WorkerInfo, operation: str, *args: object, timeout: float = 0) -> Any:
        """Call one of the other node's own operations and wait for it."""
        return self.wait(self.call(to, operation, args, None, timeout))

    def outcome(self, pending: Pending) -> Any:
        """Decode what settled the call: the result, or the error raised."""
        if pending.error is not None:
            raise afresh(pending.error)
        frame = pending.frame
        assert frame is not None
        try:
            value, _ = self._open(pending.callee.id, frame)
        except SystemExit as error:
            # From the code of a class that is rebuilt here: it must not end the caller's process.
            raise RemoteError(
                f"The result of {pending.describe()} cannot be read: {error!r}"
            ) from error
        except CodecError as error:
            raise CodecError(
                f"the result of {pending.describe()} cannot be read on worker "
                f"{self.info.name!r}: {error}"
            ) from error.__cause__
        finally:
            if self.values.journey.unconfirmed:
                self.values.opened()
        if frame.kind == Kind.ERROR:
            raise rebuild_error(told_error(value), self.trust)
        return value

    def discard(self, sender: int, frame: Frame) -> None:
        """A reply that came too late: what it refers to must be let go all the same."""
        late = self.calls.take_late(sender, frame.call_id)
        problem: BaseException | None = None
        try:
            value, _ = self._open(sender, frame)
            if late is not None and frame.kind == Kind.ERROR:
                problem = rebuild_error(told_error(value), self.trust)
        except Exception as error:
            problem = without_frames(error)
        finally:
            self.values.opened()
        if late is not None:
            late(problem)

    def post(self, to: int, topic: str, payload: object, scope: Scope | None = None) -> None:
        """Send a one-way message, handled once on the other side while both workers live.

        A parcel for that topic travels as it is.
        """
        if self.closed or to in self._lost:
            return
        message = payload if type(payload) is Parcel else (topic, payload)
        packed, note = self._prepare(message, to, scope)
        if self.values.journey.leaving:
            self.values.packed()
        self.transport.post(to, packed, note)

    def on_post(self, topic: str, handler: Callable[[int, Any], object]) -> None:
        self._topics[topic] = handler

    def on_operation(self, name: str, handler: Callable[..., object]) -> None:
        """Let others call `handler(sender, *args)` by name."""
        self._operations[name] = handler

    def on_lost(self, callback: Callable[[int, str], object]) -> None:
        self._lost_callbacks.append(callback)

    def on_closed(self, callback: Callable[[], object]) -> None:
        """Whoever waits here for something but a call is to be let go: this worker leaves."""
        self._closed_callbacks.append(callback)

    def on_unread(self, callback: Callable[[int, Frame, str], object]) -> None:
        """`callback(sender, frame, reason)`: a post of that worker was refused before anyone saw
        what it says. Nothing tells its sender."""
        self._unread_callbacks.append(callback)

    def calls_made(self) -> int:
        """Calls that this worker began to workers that are not lost, but for those of closing."""
        return self._made.total(without=self._lost)

    def calls_finished(self) -> int:
        """Calls of workers that are not lost, its own included, that this one ran to their end."""
        return self._finished.total(without=self._lost)

    def never_left(self, pending: Pending) -> None:
        """A call was settled before the transport sent it: nobody will finish it."""
        self._made.add(pending.callee.id, -1)
        self.values.take_back(pending.carried or ())
        pending.carried = None
        if pending.note:
            self.crossing.never_left(self, pending.callee.id, pending.note)
        late = self.calls.take_late(pending.callee.id, pending.call_id)
        if late is not None:
            self.runtime.spawn(partial(late, pending.error))

    def lost_workers(self) -> dict[int, str]:
        """The workers that are gone, each with the reason."""
        return dict(self._lost)

    # Serving.

    def serve(self, sender: int, frame: Frame) -> Reply | None:
        """Run a request on this thread. None: the answer comes later, or there is none."""
        if frame.kind == Kind.CALL:
            return self.serve_call(sender, frame)
        self.serve_post(sender, frame)
        return None

    def serve_call(self, sender: int, frame: Frame) -> Reply | None:
        """As `serve`, for a call."""
        try:
            request, scope = self._open(sender, frame)
            if type(request) is Parcel:
                target, args, kwargs = request.topic, (request,), {}
            else:
                target, args, kwargs = request
            self.served = kind_of(target)
        except BaseException as error:
            self._finished.add(sender)
            if isinstance(error, CodecError):
                error = self._unreadable(error)
            return self._failure(error)
        if scope is None:
            if self.around_calls is not None:
                with self.around_calls(sender):
                    return self._run(sender, frame.call_id, target, args, kwargs, None)
            return self._run(sender, frame.call_id, target, args, kwargs, None)
        with self.crossing.enter(self, scope):
            return self._run(sender, frame.call_id, target, args, kwargs, scope)

    def _run(
        self, sender: int, call_id: int, target: Any, args: Any, kwargs: Any, scope: Scope | None
    ) -> Reply | None:
        try:
            if type(target) is str:
                operation = self._operations.get(target)
                if operation is None:
                    raise TelegradError(f"worker {self.info.name!r} knows no operation {target!r}")
                result = operation(sender, *args)
            else:
                if self.data_only:
                    self.require_exported(target)
                if self.values.journey.unconfirmed:
                    self.values.await_confirmed()
                self.transport.starting(target)
                result = as_result(self.coroutines, target, target(*args, **kwargs))
            if type(result) is Later:
                self._reply_later(sender, call_id, result, scope, target)
                return None
            reply = self._success(sender, result, scope, target)
        except BaseException as error:
            reply = self._failure(error)
        self._finished.add(sender)
        return reply

    def _unreadable(self, error: CodecError) -> CodecError:
        named = CodecError(f"worker {self.info.name!r} cannot read a call: {error}")
        named.__cause__ = error.__cause__
        return named

    def require_exported(self, target: object) -> None:
        if not is_exported(target):
            name = getattr(target, "__qualname__", type(target).__qualname__)
            raise Refused(
                f"worker {self.info.name!r} takes data only and does not run {name}: mark it with "
                "@telegrad.export there"
            )

    def too_many_calls(self, sender: int, frame: Frame) -> Reply:
        """The answer to a call that is one too many; it is not run."""
        return self._refusal(
            sender,
            frame,
            f"already runs {self.limits.calls_in_flight} calls of worker "
            f"{self.members.name(sender)!r} and takes no more: wait for some of them, or raise "
            "rpc.Limits.calls_in_flight there",
        )

    def too_many_bytes(self, sender: int, frame: Frame) -> Reply:
        """The answer to a call that is too large beside those that run; it is not run."""
        return self._refusal(
            sender,
            frame,
            f"already runs calls of worker {self.members.name(sender)!r} that brought nearly "
            f"{self.limits.bytes_in_flight} bytes and takes no more: wait for some of them, or "
            "raise rpc.Limits.bytes_in_flight there",
        )

    def too_many_answers(self, sender: int, frame: Frame) -> Reply:
        """The answer to a call of one who has not taken those before; it is not run."""
        return self._refusal(
            sender,
            frame,
            f"keeps too many bytes of answers that worker {self.members.name(sender)!r} has not "
            "taken: wait for some of them",
        )

    def numbered_twice(self, sender: int, frame: Frame) -> Reply:
        """The answer to a call under the number of one that runs; it is not run."""
        name = self.members.name(sender)
        why = f"already runs a call of worker {name!r} with that number"
        return self._refusal(sender, frame, why)

    def _refusal(self, sender: int, frame: Frame, why: str) -> Reply:
        # It is read all the same: the references in it are to be let go, and a backward pass is
        # not to wait for the gradients of what never came.
        with contextlib.suppress(BaseException):
            self._open(sender, frame)
        self.values.opened()
        self._finished.add(sender)
        return self._failure(Refused(f"worker {self.info.name!r} {why}"))

    def _reply_later(
        self, to: int, call_id: int, later: Later, scope: Scope | None, target: object
    ) -> None:
        def finish(value: object, error: BaseException | None) -> None:
            if error is None:
                try:
                    reply = self._success(to, value, scope, target)
                except BaseException as problem:
                    reply = self._failure(problem)
            else:
                reply = self._failure(error)
            if target != CLOSING:
                self._finished.add(to)
            self.transport.reply(to, call_id, reply)

        later.subscribe(finish)

    def serve_post(self, sender: int, frame: Frame) -> None:
        """As `serve`, for a post."""
        try:
            try:
                message, scope = self._open(sender, frame)
            except Exception as error:
                for callback in self._unread_callbacks:
                    callback(sender, frame, str(error))
                raise
            topic, payload = (message.topic, message) if type(message) is Parcel else message
            # Not every value can be hashed or shown in time: see wire/hashing.py.
            handler = self._topics.get(topic) if type(topic) is str else None
            if handler is None:
                raise CodecError(f"a post for an unknown topic came from {sender}")
            self.served = hash(topic)
            if scope is None:
                handler(sender, payload)
            else:
                with self.crossing.enter(self, scope):
                    handler(sender, payload)
        except Exception:
            report_background_error(f"a message from worker {self.members.name(sender)!r}")

    def _success(self, to: int, value: object, scope: Scope | None, target: object) -> Reply:
        try:
            packed, note = self._prepare(value, to, scope)
        except Unpackable as problem:
            raise of_result(problem, target, self.info.name) from problem.__cause__
        if self.values.journey.leaving:
            self.values.packed()
        return Reply(Kind.REPLY, packed, note)

    def _failure(self, error: BaseException) -> Reply:
        told = describe_error(self.info.name, error, self.trust)
        packed = pack(told)
        if len(packed.meta) > self.limits.metadata_bytes:
            # The caller would take who sends that for one who breaks the rules.
            packed = pack(in_brief(told))
        return Reply(Kind.ERROR, packed)

    # Packing: references that leave in a message that never leaves must be taken back.

    def _prepare(self, value: object, to: int, scope: Scope | None) -> tuple[Packed, bytes]:
        """A message and the note that goes with it. `Values.packed` has to follow, if references
        leave with it."""
        try:
            packed = value
            if type(packed) is not Packed:
                packed = pack(value, self.passages[to], self.trust)
            if not self._usual_limits:
                self._check_size(packed)
            if scope is None:
                return packed, b""
            return packed, self.crossing.leaving(self, to, packed.tensors, scope)
        except BaseException:
            self.values.take_back(self.values.packed())
            raise

    def _check_size(self, packed: Packed) -> None:
        """The others have the same limits, as a rule: better an error here than a cut link."""
        limits = self.limits
        total = len(packed.meta) + sum(buffer.nbytes for buffer in packed.buffers)
        for name, size in (
            ("metadata_bytes", len(packed.meta)),
            ("tensors", len(packed.buffers)),
            ("message_bytes", total),
        ):
            if size > getattr(limits, name):
                raise ValueError(
                    f"a message with {size} {name.replace('_', ' ')} passes the limit of "
                    f"{getattr(limits, name)}: send less at a time, or raise rpc.Limits.{name} on "
                    "every worker"
                )

    def _open(self, sender: int, frame: Frame) -> tuple[Any, Scope | None]:
        if not frame.note:
            passage, limits = self.passages[sender], self._codec_limits
            return unpack(frame.meta, frame.buffers, passage, self.trust, limits), None
        scopes: list[Scope | None] = []

        def arrive(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            tensors, scope = self.crossing.arriving(self, sender, frame.note, tensors)
            scopes.append(scope)
            return tensors

        passage, limits = self.passages[sender], self._codec_limits
        try:
            value = unpack(frame.meta, frame.buffers, passage, self.trust, limits, arrive)
        except BaseException:
            if not scopes:
                with contextlib.suppress(TelegradError):
                    self.crossing.never_arrived(self, sender, frame.note)
            raise
        return value, scopes[0]

    # Endings.

    def worker_lost(self, worker: int, reason: str) -> list[Pending]:
        """A worker is gone: settle what waits for it and tell the layers above, once."""
        if worker in self._lost or self.closed:
            return []
        self._lost[worker] = reason
        self.has_losses = True
        self.members.lost(worker)
        name = self.members.name(worker)
        failed = self.calls.fail(worker, self.loss_of(worker))
        self.values.worker_lost(worker, reason)
        self.passages.pop(worker, None)
        self._made.forget(worker)
        self._finished.forget(worker)
        for callback in list(self._lost_callbacks):
            try:
                callback(worker, reason)
            except Exception:
                report_background_error(f"a callback on the loss of worker {name!r}")
        return failed

    def loss_of(self, worker: int) -> WorkerLost:
        """The error for what depended on a worker that is lost."""
        reason = self._lost[worker]
        if self.none_returns is not None:
            reason = f"{reason}; {self.none_returns}"
        return WorkerLost.of(self.members.name(worker), reason)

    def is_lost(self, worker: int) -> bool:
        return worker in self._lost

    def _settle_lost(self, pending: Pending) -> None:
        self.calls.fail(pending.callee.id, self.loss_of(pending.callee.id))
        pending.complete()

    def close(self) -> list[Pending]:
        """End everything at once; returns the calls that this cut off."""
        self.closed = True
        cut = self.calls.fail(
            None, JobClosed(f"Worker {self.info.name!r} shut down before the answer came.")
        )
        for callback in self._closed_callbacks:
            try:
                callback()
            except Exception:
                report_background_error("the end of what waits here")
        self.coroutines.close()
        return cut


_services: dict[str, Callable[[Node], object]] = {}
_default_crossing: Crossing = NoCrossing()


def register_layer(
    name: str, service: Callable[[Node], object], crossing: Crossing | None = None
) -> None:
    """A layer above adds its part to every node made from now on."""
    global _default_crossing
    _services[name] = service
    if crossing is not None:
        _default_crossing = crossing
