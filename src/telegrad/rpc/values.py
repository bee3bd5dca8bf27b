"""The values that this worker owns for others, and the driver of the reference protocol.

`references.py` decides who holds what; here are the values themselves, the threads that wait for
them, and the messages that the protocol asks for.

Actions of the core are carried out in the order in which it gave them, outside of the lock: the
thread that finds nobody doing so carries out all that is there. Messages leave by the `Mail`. RRef
objects die anywhere, even in a garbage collection under our own lock, so a death is only put on a
queue and told to the core later.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad.rpc.calls import Pending, afresh
from telegrad.rpc.errors import (
    CallTimeout,
    JobClosed,
    ReferenceLost,
    Refused,
    RemoteTraceback,
    TelegradError,
    WorkerLost,
)
from telegrad.rpc.failures import traceback_of
from telegrad.rpc.methods import FETCH, fetch_parcel
from telegrad.rpc.reference_mail import Lane, Mail
from telegrad.rpc.reference_messages import (
    Fence,
    ForkId,
    Handle,
    Message,
    ReferenceId,
    Transfer,
)
from telegrad.rpc.references import (
    Action,
    Confirmed,
    Drop,
    Failed,
    Lost,
    Post,
    References,
    State,
)
from telegrad.rpc.results import Finish

if TYPE_CHECKING:
    from telegrad.rpc.node import Node

ABSENT = object()
"""What `Values.stored` can give for a value that is not there."""
PATIENCE_WITH_LANES = 1.0
PATIENCE_WITH_PROMISE = 60.0
"""Seconds by which the request that makes a value may come later than a reference to it; and by
those more for which a connection may be broken, while the request is sent again."""


class _Journey(threading.local):
    """What the calling thread is just packing or unpacking."""

    def __init__(self) -> None:
        self.leaving: list[Transfer] = []
        self.unconfirmed: list[ForkId] = []


class _Waiter:
    """Who is to be given a value, and for whose sake."""

    __slots__ = ("_finish", "asked_by", "stop_clock")

    def __init__(self, asked_by: int, finish: Finish) -> None:
        self.asked_by = asked_by
        self._finish = finish
        self.stop_clock: Callable[[], None] | None = None

    def finish(self, value: object, error: BaseException | None) -> None:
        if self.stop_clock is not None:
            self.stop_clock()
        self._finish(value, error)


class Values:
    """Owned values and held references of one worker."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Who may name a value may have it. Where workers do not trust each other, a name must
        # therefore be told, not guessed.
        self._core = References(
            node.info.id, _unguessable if node.data_only else None, node.ledger("references")
        )
        self._introduced = 0
        self._changed = node.runtime.condition()
        self._guard = self._changed.guard
        self._stored: dict[ReferenceId, object] = {}
        self.stored = self._stored.get
        """An owned value that is there already, by its reference; else what is given besides."""
        self._waiters: dict[ReferenceId, list[_Waiter]] = {}
        self.patience_with_promise = PATIENCE_WITH_PROMISE + node.liveness
        self.lost: dict[ForkId, ReferenceLost] = {}
        """The references whose values cannot be had any more."""
        self._actions: deque[Action] = deque()
        self._acting = False
        self._mail = Mail(node, self._changed, self._receive)
        node.on_closed(self._close)
        self._deaths: deque[Handle] = deque()
        self.journey = _Journey()

    # Making references.

    def keep(self, value: object) -> ReferenceId:
        """Own a value that is there already."""
        with self._guard:
            reference = self._core.create_local()
            self._stored[reference] = value
        return reference

    def promise_own(self) -> ReferenceId:
        """Own a value that a `remote()` to oneself will make."""
        with self._guard:
            return self._core.create_local(State.PENDING)

    def name_remote(self, owner: int) -> Transfer:
        with self._guard:
            try:
                return self._core.create_remote(owner)
            except WorkerLost as loss:
                raise self._by_name(loss) from None

    def creation_answered(self, created: Transfer) -> None:
        """The owner knows of the value that it was asked to make."""
        with self._guard:
            self._core.create_answered(created)
        self._act()

    def creation_refused(self, created: Transfer, reason: str) -> None:
        """The owner does not even take note that there is no such value."""
        with self._guard:
            self._core.create_refused(created, reason)
        self._act()

    def abandon(self, created: Transfer) -> None:
        with self._guard:
            self._core.abandon(created)

    # Travelling: called by the codec on the thread that packs or unpacks.

    def share(self, handle: Handle, to: int) -> Transfer:
        with self._guard:
            try:
                transfer = self._core.share(handle, to)
            except WorkerLost as loss:
                raise self._by_name(loss) from None
        self.journey.leaving.append(transfer)
        return transfer

    def _by_name(self, loss: WorkerLost) -> WorkerLost:
        """The core knows workers by their numbers only."""
        name = self._node.members.name(int(loss.worker))
        return type(loss).of(name, loss.cause, "a reference that was to be sent")

    def packed(self) -> Sequence[Transfer]:
        """The message of this thread is packed, or failed to be: the references that it carries."""
        carried, self.journey.leaving = self.journey.leaving, []
        return carried

    def take_back(self, carried: Sequence[Transfer]) -> None:
        """The message that carries these will not leave."""
        if carried:
            with self._guard:
                for transfer in carried:
                    self._core.unshare(transfer)
            self._act()

    def arrive(self, transfer: Transfer) -> Handle:
        """A reference came in: the handle for its RRef object here."""
        try:
            with self._guard:
                confirmed = self._core.arrive(transfer)
        finally:
            self._act()
        if transfer.reference.owner == self._node.info.id:
            return transfer.reference
        if not confirmed:
            self.journey.unconfirmed.append(transfer.fork)
        return transfer.fork

    def await_confirmed(self) -> None:
        """A function runs only after its owners know the references among its arguments."""
        forks = self.journey.unconfirmed
        with self._guard:
            for fork in forks:
                while self._core.awaits_owner(fork) and not self._node.closed:
                    self._changed.wait(1.0)
        forks.clear()

    def opened(self) -> None:
        """The message that this thread unpacked is not a request: nothing waits for it."""
        self.journey.unconfirmed.clear()

    # The end of RRef objects.

    def died(self, handle: Handle) -> None:
        """An RRef object is gone. Safe inside of a garbage collection."""
        self._deaths.append(handle)
        self._node.transport.nudge()

    @property
    def has_deaths(self) -> bool:
        return bool(self._deaths)

    def bury(self) -> None:
        """Tell the core of the objects that died."""
        with self._guard:
            while self._deaths:
                handle = self._deaths.popleft()
                self._core.drop(handle)
                if isinstance(handle, ForkId):
                    self.lost.pop(handle, None)
        self._act()

    def holds(self) -> int:
        """How many references to values of others have an object here."""
        with self._guard:
            return len(self._core.held())

    def release_all(self) -> None:
        """Drop every reference that this worker holds, whoever still has an object of it."""
        with self._guard:
            for fork in self._core.held():
                self._core.drop(fork)
        self._act()
        until = self._node.runtime.now() + PATIENCE_WITH_LANES
        with self._guard:
            while self._mail.waits():
                left = until - self._node.runtime.now()
                if left <= 0:
                    return
                self._changed.wait(left)

    # Asking for values.

    def ask_for(self, reference: ReferenceId, timeout: float | None = None) -> Pending:
        """Begin to fetch the value of another worker, for one who will wait for it."""
        owner = self._node.members.member(reference.owner).info
        asked = fetch_parcel(reference)
        return self._node.call(owner, FETCH, (), None, timeout, written=asked)

    def state(self, reference: ReferenceId) -> State:
        with self._guard:
            return self._core.state(reference)

    def confirmed(self, handle: Handle) -> bool:
        with self._guard:
            return self._core.confirmed(handle)

    def loss(self, handle: Handle) -> BaseException | None:
        """Why the value behind this handle cannot be had, ready to be raised."""
        error = self.lost.get(handle) if isinstance(handle, ForkId) else None
        return None if error is None else afresh(error)

    def when_ready(
        self, reference: ReferenceId, finish: Finish, asked_by: int | None = None
    ) -> None:
        """Give the value, or what went wrong, to `finish`: now, or when it is there, or when the
        worker that wants it is gone."""
        with self._guard:
            state = self._core.state(reference)
            if state in (State.PENDING, State.PROMISED):
                waiter = _Waiter(self._node.info.id if asked_by is None else asked_by, finish)
                if state is State.PROMISED:
                    expire = partial(self._expire_promise, reference, waiter)
                    clock = self._node.runtime.call_later(self.patience_with_promise, expire)
                    waiter.stop_clock = clock
                self._waiters.setdefault(reference, []).append(waiter)
                return
            value, error = self._look(reference, state)
        finish(value, error)

    def _expire_promise(self, reference: ReferenceId, waiter: _Waiter) -> None:
        """Who waits for a value that was promised does so for a while only."""
        with self._guard:
            waiters = self._waiters.get(reference, [])
            if self._core.state(reference) is not State.PROMISED or waiter not in waiters:
                return
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[reference]
        waiter.finish(None, self._never_asked_for(reference))

    def _never_asked_for(self, reference: ReferenceId) -> ReferenceLost:
        promised_by = self._node.members.name(reference.created_on)
        return ReferenceLost(
            f"{reference} of worker {self._node.info.name!r} was never asked for by who promised "
            f"it, worker {promised_by!r}."
        )

    def value(self, reference: ReferenceId, timeout: float = 0) -> Any:
        """Wait for an owned value."""
        now = self._node.runtime.now
        deadline = now() + timeout if timeout > 0 else math.inf
        promise_ends = now() + self.patience_with_promise
        with self._guard:
            while (state := self._core.state(reference)) in (State.PENDING, State.PROMISED):
                if self._node.closed:
                    raise JobClosed(
                        f"Worker {self._node.info.name!r} shut down before the value of "
                        f"{reference} was there."
                    )
                until = deadline if state is State.PENDING else min(deadline, promise_ends)
                remaining = until - now()
                if remaining <= 0 and until == deadline:
                    raise _timeout(reference, timeout)
                if remaining <= 0:
                    raise self._never_asked_for(reference)
                self._changed.wait(None if until == math.inf else remaining)
            value, error = self._look(reference, state)
        if error is not None:
            raise error
        return value

    def _close(self) -> None:
        with self._guard:
            self._changed.notify_all()

    def find(self, reference: ReferenceId) -> tuple[bool, object, BaseException | None]:
        """Whether an owned value need not be waited for; then the value, or what went wrong."""
        value = self._stored.get(reference, ABSENT)
        if value is not ABSENT:
            return True, value, None
        with self._guard:
            state = self._core.state(reference)
            if state is State.PENDING or state is State.PROMISED:
                return False, None, None
            return True, *self._look(reference, state)

    def _look(self, reference: ReferenceId, state: State) -> tuple[object, BaseException | None]:
        if state is State.READY:
            return self._stored[reference], None
        if state is State.FAILED:
            error = self._core.error(reference)
            return None, None if error is None else afresh(error)
        return None, ReferenceLost(
            f"{reference} has no value any more: all references were dropped."
        )

    # Making values for others.

    def take_request(self, created: Transfer) -> None:
        """A request to make a value came; `settle` follows. Raises if no more may be kept."""
        try:
            with self._guard:
                self._core.create_requested(created)
        except Refused:
            self._act()
            raise

    def settle(self, reference: ReferenceId, value: object, error: BaseException | None) -> None:
        """The function that was to make a value has ended: tell those who wait."""
        with self._guard:
            if error is None:
                wanted = self._core.settle(reference)
                if wanted:
                    self._stored[reference] = value
            else:
                self._core.fail(reference, _kept(self._node.info.name, error))
            waiters = self._waiters.pop(reference, [])
            self._changed.notify_all()
        for waiter in waiters:
            waiter.finish(value, error)

    # The protocol's messages and actions.

    def _receive(self, sender: int, message: Message) -> None:
        if isinstance(message, Fence):
            for worker in message.lost:
                if worker != self._node.info.id:
                    self._node.transport.told_of_loss(sender, worker)
            if self._node.is_lost(sender):
                return
        with self._guard:
            if self._core.has_losses:
                self._introduce()
            self._core.receive(sender, message)
        self._act()

    def worker_lost(self, worker: int, reason: str) -> None:
        with self._guard:
            self._introduce()
            self._core.worker_lost(worker, reason)
            self._mail.forget(worker)
            never = [r for r in self._waiters if self._core.state(r) is State.GONE]
            waiters = [waiter for r in never for waiter in self._waiters.pop(r)]
            waiters += self._waiters_for(worker)
            self._changed.notify_all()
        self._act()
        for waiter in waiters:
            waiter.finish(
                None, ReferenceLost(f"The worker that was to make the value is gone: {reason}")
            )

    def _waiters_for(self, worker: int) -> list[_Waiter]:
        """Take out those who wait for the sake of that worker."""
        let_go: list[_Waiter] = []
        for reference, waiters in list(self._waiters.items()):
            let_go += [waiter for waiter in waiters if waiter.asked_by == worker]
            kept = [waiter for waiter in waiters if waiter.asked_by != worker]
            self._waiters[reference] = kept
            if not kept:
                del self._waiters[reference]
        return let_go

    def _introduce(self) -> None:
        """Before a fence: all workers are asked, also those that this one never met."""
        members = self._node.members
        if len(members) != self._introduced:
            self._introduced = len(members)
            for worker in members.live():
                self._core.worker_joined(worker)

    def _act(self) -> None:
        waiting: dict[int, Lane] = {}
        acting = False
        try:
            with self._guard:
                self._actions.extend(self._core.take_actions())
                if self._acting:
                    return
                acting = self._acting = True
            while (action := self._next_action(waiting)) is not None:
                self._carry_out(action)
        except BaseException:
            if acting:
                self._acting = False
            raise
        finally:
            self._mail.send_along(waiting)

    def _next_action(self, waiting: dict[int, Lane]) -> Action | None:
        """What is to be done here; the messages before it are put into their lanes."""
        with self._guard:
            self._actions.extend(self._core.take_actions())
            while self._actions:
                action = self._actions.popleft()
                if not isinstance(action, Post):
                    return action
                waiting[action.to] = self._mail.put(action.to, action.message)
            self._acting = False
        return None

    def _carry_out(self, action: Action) -> None:
        match action:
            case Drop(reference):
                self._stored.pop(reference, None)
            case Confirmed():
                with self._guard:
                    self._changed.notify_all()
            case Lost(fork, error):
                with self._guard:
                    self.lost[fork] = error
                    self._changed.notify_all()
            case Failed(reference):
                with self._guard:
                    reason = self._core.error(reference)
                    waiters = self._waiters.pop(reference, [])
                    self._changed.notify_all()
                for waiter in waiters:
                    waiter.finish(None, reason)

    def debug_info(self) -> dict[str, int]:
        with self._guard:
            info = self._core.debug_info()
        return {**info, "values": len(self._stored), "waiters": len(self._waiters)}


def _kept(worker: str, error: BaseException) -> BaseException:
    """An error as it is stored: with the text of its traceback instead of the frames."""
    kept = afresh(error)
    kept.__cause__ = RemoteTraceback(worker, traceback_of(error))
    return kept


def _unguessable() -> int:
    return secrets.randbits(62)


def _timeout(reference: ReferenceId, timeout: float) -> TelegradError:
    return CallTimeout(
        f"RPC ran for more than {timeout * 1000:g} milliseconds and timed out: the value of "
        f"{reference} is still being made."
    )
