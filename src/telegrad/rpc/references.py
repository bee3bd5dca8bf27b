"""Who holds which reference: the owner keeps a value exactly as long as someone can ask for it.

The words. A *reference* names a value that lives on its *owner*. A *fork* is one RRef object on
another worker. The owner's table of forks, together with its own RRef objects (*handles*), decides
when the value goes. A *transfer* is a reference inside a message: a fork that is about to be.

The one rule. *Every fork in the hands of a live worker is in the owner's table, or descends from
one that is and that will stay there until this one has come in.* All the rest keeps that rule:

1.  A fork that the owner hands out is in the table as it leaves. Its receiver is confirmed at once.
2.  A fork that a holder passes on *pins* the fork it came from. The receiver registers it with the
    owner; the owner then tells the receiver `Accepted` and the one who passed it on `Unpin`.
3.  A reference passed back to its owner is pinned too, until the owner has made it a handle.
4.  `remote()` names reference and fork itself; the owner enters the fork as the request arrives.
    The caller's fork is unconfirmed until the owner has answered, be it too late for who made the
    call: what says `Release` before could overtake the request. Others may mention the reference
    to the owner before the request does, as requests and posts travel apart: the value is then
    *promised*.
5.  A fork leaves the owner's table by `Release`, and that is sent only when its object is gone, the
    owner has confirmed it, and nothing is pinned to it. A dropped object may thus live on here.

Losing a worker. What a lost worker held must go, but it may have passed forks on before it died:
to a survivor whose registration is still on its way, or through workers that died as well. A
survivor that learns of the loss is *fenced* from then on: it accepts nothing more from the lost
one. In the same step it registers, in the lost one's name, the forks it had passed to it: they
join the lost one's other holds, and the pins go by the usual `Unpin`. An owner with holds of a lost
worker in its table asks all live ones (`Fence`); each answers (`Fenced`) when it is fenced, and as
posts keep their order, after every registration that it owed. The holds go when all have answered.

*All open fences end together.* If S and then W are lost, S may have given a fork to W and W to T.
That T is fenced from S says nothing about what W may still bring to T; so nobody's holds go while
any live worker may still accept something from any lost one. Why that suffices: take a fork on a
live worker that the owner does not know. The one who passed it on is lost, then its registration
came before the holder's answer, and the owner knows it after all; or is live and has pinned the
fork before it, to which the same reasoning applies; the chain ends at a fork of a live worker in
the table, and those stay. The simulation in the tests breaks each of these rules and sees it fail.

What must never happen: a `Drop` for a value that a live worker can still name.

What the driver owes:

-   It calls every method under one lock, and takes the actions in order. Objects may die anywhere,
    even while their thread holds that lock: it queues their deaths and calls `drop` later.
-   Posts between two live workers arrive once and in order. `Accepted` and `Unpin` commute with
    everything and may ride on a reply instead; `Register`, `Release`, `Fence`, `Fenced` may not.
-   Requests and replies may arrive in any order, but each transfer that arrives is given to
    `arrive` or `refuse` exactly once, also if its message is not wanted any more (a late reply).
    `unshare` is for messages of which no byte left.
-   A request of `remote()` that cannot be unpacked or run is still given to `create_requested`.
-   A worker's number is never used again. Every live worker hears of every loss, in any order. A
    worker that has accepted anything from W is announced (`worker_joined`) everywhere before W's
    loss is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from telegrad.rpc.errors import LostWithWorker, ReferenceLost, Refused, WorkerLost
from telegrad.rpc.limits import Ledger, unlimited
from telegrad.rpc.reference_messages import (
    Accepted,
    Fence,
    Fenced,
    ForkId,
    Gone,
    Handle,
    Message,
    ReferenceId,
    Register,
    Release,
    Transfer,
    Unpin,
)

MOST_REMEMBERED = 4096
"""So many values that were refused, and that have been, are told from those to come."""

T = TypeVar("T")


class State(Enum):
    PROMISED = auto()  # the request that creates it has not arrived
    PENDING = auto()  # its function runs
    READY = auto()
    FAILED = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Post:
    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the value, if there is one yet."""

    reference: ReferenceId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner knows this fork."""

    fork: ForkId


@dataclass(frozen=True, slots=True)
class Lost:
    """The value behind this fork cannot be had any more."""

    fork: ForkId
    error: ReferenceLost


@dataclass(frozen=True, slots=True)
class Failed:
    """A promised value will not be created; its `error` says why. Its waiters are to be told."""

    reference: ReferenceId


Action = Post | Drop | Confirmed | Lost | Failed


@dataclass(slots=True)
class _Owned:
    state: State
    handles: int = 0
    holders: dict[ForkId, int] = field(default_factory=dict)
    error: BaseException | None = None


class _Standing(Enum):
    UNCONFIRMED = auto()
    CONFIRMED = auto()
    LOST = auto()


@dataclass(slots=True)
class _Held:
    reference: ReferenceId
    standing: _Standing
    pins: set[ForkId] = field(default_factory=set)
    dropped: bool = False
    refusal: str = ""
    """Why a live owner does not keep the value."""


class _Pin(NamedTuple):
    parent: ForkId
    to: int


class References:
    """One worker's part of the protocol. Methods are events; `take_actions` is the answer."""

    def __init__(
        self, me: int, number: Callable[[], int] | None = None, ledger: Ledger | None = None
    ) -> None:
        """`number` gives one that it never gave before, for the name of a reference or a fork.

        `ledger` bounds what is kept for each other worker: the forks in the table of which it told,
        and those here that it gave.
        """
        self._me = me
        self._ledger = ledger or unlimited()
        # Who told of a fork, where that is not its holder.
        self._tellers: dict[Transfer, int] = {}
        self._refusals: dict[ReferenceId, Refused] = {}
        self._dropped: dict[ReferenceId, None] = {}
        self._number = number or itertools.count().__next__
        self._owned: dict[ReferenceId, _Owned] = {}
        self._held: dict[ForkId, _Held] = {}
        self._pins: dict[ForkId, _Pin] = {}
        self._live: set[int] = set()
        self._lost: dict[int, str] = {}
        self._fenced: set[int] = set()
        self._awaited: set[tuple[int, int]] = set()
        self._asked: dict[int, set[int]] = {}
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # Making references

    def create_local(self, state: State = State.READY) -> ReferenceId:
        """A value of this worker: there already, or PENDING for a `remote()` to oneself."""
        reference = ReferenceId(self._me, self._me, self._number())
        self._owned[reference] = _Owned(state, handles=1)
        return reference

    def create_remote(self, owner: int) -> Transfer:
        """The names that a request of `remote()` carries to another worker."""
        self._require_live(owner)
        reference = ReferenceId(owner, self._me, self._number())
        fork = ForkId(self._me, self._number())
        self._held[fork] = _Held(reference, _Standing.UNCONFIRMED)
        return Transfer(reference, fork)

    def abandon(self, created: Transfer) -> None:
        """The request of `remote()` never left, and nobody was given its reference."""
        self._held.pop(created.fork, None)

    def create_requested(self, created: Transfer) -> None:
        """A request of `remote()` arrived. `settle` or `fail` follows."""
        reference, fork = created
        self._require_not_fenced(fork.created_on)
        owned = self._owned.setdefault(reference, _Owned(State.PENDING))
        try:
            self._enter(created, owned, fork.created_on, fork.created_on)
        except Refused as refusal:
            self._post(fork.created_on, Gone(fork, str(refusal)))
            # Who was given the reference may have told of it before; and who asks for the value may
            # do so before it has heard that there is none.
            owned.state, owned.error = State.FAILED, Refused(str(refusal))
            _remember(self._refusals, reference, owned.error)
            self._actions.append(Failed(reference))
            self._drop_unheld(reference, owned)
            raise
        owned.state = State.PENDING

    def create_answered(self, created: Transfer) -> None:
        """The owner has answered the request of `remote()`, so it has the fork in its table."""
        if self.awaits_owner(created.fork):
            self._confirm(created.fork)
        else:
            # Refused at first, and then there was room to be told of that; or left to itself.
            self._post(created.reference.owner, Release(created))

    def create_refused(self, created: Transfer, reason: str) -> None:
        """The owner took neither the request of `remote()` nor the news that there is none."""
        self._be_refused(created.fork, reason)

    def settle(self, reference: ReferenceId) -> bool:
        """The value is there. False if nobody wants it any more: do not keep it."""
        owned = self._owned.get(reference)
        if owned is None:
            return False
        owned.state = State.READY
        return True

    def fail(self, reference: ReferenceId, error: BaseException) -> bool:
        """Creating the value failed; `error` is for all who fetch it."""
        owned = self._owned.get(reference)
        if owned is None:
            return False
        owned.state, owned.error = State.FAILED, error
        return True

    def state(self, reference: ReferenceId) -> State:
        """Of a value of this worker. A fetch may overtake the request that creates its value."""
        owned = self._owned.get(reference)
        if owned is not None:
            return owned.state
        if reference in self._refusals:
            return State.FAILED
        creator = reference.created_on
        gone = creator == self._me or creator in self._lost or reference in self._dropped
        return State.GONE if gone else State.PROMISED

    def error(self, reference: ReferenceId) -> BaseException | None:
        owned = self._owned.get(reference)
        return owned.error if owned else self._refusals.get(reference)

    def confirmed(self, handle: Handle) -> bool:
        """Whether the owner knows of this RRef object."""
        if isinstance(handle, ReferenceId):
            return True
        held = self._held.get(handle)
        return held is not None and held.standing is _Standing.CONFIRMED

    def awaits_owner(self, fork: ForkId) -> bool:
        """Whether the owner has still to say that it knows of this fork."""
        held = self._held.get(fork)
        return held is not None and held.standing is _Standing.UNCONFIRMED

    # Passing them on

    def share(self, handle: Handle, to: int) -> Transfer:
        """A reference is about to leave in a message."""
        if to != self._me:
            self._require_live(to)
        if isinstance(handle, ReferenceId):
            transfer = Transfer(handle, ForkId(self._me, self._number()))
            self._enter(transfer, self._owned[handle], to, to)
            return transfer
        held = self._held[handle]
        if held.standing is _Standing.LOST:
            is_lost = held.reference.owner in self._lost
            raise self._owner_lost(held.reference) if is_lost else ReferenceLost(held.refusal)
        fork = ForkId(self._me, self._number())
        held.pins.add(fork)
        self._pins[fork] = _Pin(handle, to)
        return Transfer(held.reference, fork)

    def unshare(self, transfer: Transfer) -> None:
        """The message with this transfer never left."""
        if transfer.reference.owner == self._me:
            self._release(transfer)
        else:
            self._unpin(transfer.fork)

    def arrive(self, transfer: Transfer) -> bool:
        """A reference came in a message. Whether it is confirmed; if not, Confirmed or Lost
        follows. Its handle is the reference on the owner and the fork elsewhere."""
        reference, fork = transfer
        self._require_not_fenced(fork.created_on)
        if reference.owner == self._me:
            self._come_home(transfer)
            return True
        if fork in self._held:
            # What hangs on the first would be forgotten and never let go.
            raise ValueError("a reference that is here already came a second time")
        try:
            self._ledger.charge(fork.created_on)
        except Refused:
            self.refuse(transfer)
            raise
        if reference.owner in self._lost:
            self._held[fork] = _Held(reference, _Standing.LOST)
            self._actions.append(Lost(fork, self._owner_lost(reference)))
            return False
        from_owner = fork.created_on == reference.owner
        standing = _Standing.CONFIRMED if from_owner else _Standing.UNCONFIRMED
        self._held[fork] = _Held(reference, standing)
        if not from_owner:
            self._post(reference.owner, Register(transfer, self._me))
        return from_owner

    def refuse(self, transfer: Transfer) -> None:
        """A reference came in a message that nobody wants: as `arrive` and `drop`, but cheaper."""
        giver = transfer.fork.created_on
        if giver == transfer.reference.owner:
            self._post(giver, Release(transfer))
        else:
            self._post(giver, Unpin(transfer.fork))

    def drop(self, handle: Handle) -> None:
        """An RRef object is gone."""
        if isinstance(handle, ReferenceId):
            owned = self._owned[handle]
            owned.handles -= 1
            self._drop_unheld(handle, owned)
        elif held := self._held.get(handle):
            held.dropped = True
            self._release_if_done(handle, held)

    def held(self) -> list[ForkId]:
        """The forks whose objects live here: what a shutdown drops in their stead."""
        return [fork for fork, held in self._held.items() if not held.dropped]

    # Messages

    def receive(self, sender: int, message: Message) -> None:
        if sender in self._lost:
            return
        match message:
            case Register():
                self._register(sender, message)
            case Accepted(fork):
                self._confirm(fork)
            case Unpin(fork):
                self._unpin(fork)
            case Release(transfer):
                self._release(transfer)
            case Fence(lost):
                for worker in lost:
                    self._answer_fence(sender, worker)
            case Fenced(worker):
                self._awaited.discard((sender, worker))
                self._end_fences_if_answered()
            case Gone(fork, reason):
                self._be_refused(fork, reason)

    def _register(self, sender: int, message: Register) -> None:
        transfer, holder = message.transfer, message.holder
        reference, fork = transfer
        owned = self._known_or_promised(reference)
        if owned is None:
            self._post(sender, Gone(fork))
        else:
            self._register_with(owned, sender, message)
            self._drop_unheld(reference, owned)
        self._post(fork.created_on, Unpin(fork))
        if holder in self._lost:
            self._begin_fences()

    def _register_with(self, owned: _Owned, sender: int, message: Register) -> None:
        transfer, holder = message.transfer, message.holder
        if holder in self._fenced:
            return
        try:
            self._enter(transfer, owned, holder, sender)
        except Refused as refusal:
            self._post(sender, Gone(transfer.fork, str(refusal)))
            return
        if holder == sender:
            self._post(holder, Accepted(transfer.fork))

    def _be_refused(self, fork: ForkId, reason: str) -> None:
        held = self._held.get(fork)
        # What is confirmed came into the table after it was refused.
        if held is not None and held.standing is _Standing.UNCONFIRMED:
            held.refusal = reason
            self._lose(fork, held, ReferenceLost(reason))

    def _confirm(self, fork: ForkId) -> None:
        held = self._held.get(fork)
        if held is not None and held.standing is _Standing.UNCONFIRMED:
            held.standing = _Standing.CONFIRMED
            self._actions.append(Confirmed(fork))
            self._release_if_done(fork, held)

    def _unpin(self, fork: ForkId) -> None:
        pin = self._pins.pop(fork, None)
        if pin is not None:
            held = self._held[pin.parent]
            held.pins.discard(fork)
            self._release_if_done(pin.parent, held)

    def _release_if_done(self, fork: ForkId, held: _Held) -> None:
        if not held.dropped or held.pins or held.standing is _Standing.UNCONFIRMED:
            return
        del self._held[fork]
        if fork.created_on != self._me:
            self._ledger.credit(fork.created_on)
        if held.standing is _Standing.CONFIRMED:
            self._post(held.reference.owner, Release(Transfer(held.reference, fork)))

    # The owner's table

    def _known_or_promised(self, reference: ReferenceId) -> _Owned | None:
        """The entry of a reference that someone mentions; None if it was here and is gone."""
        owned = self._owned.get(reference)
        if owned is not None:
            return owned
        refusal = self._refusals.get(reference)
        if refusal is not None:
            owned = self._owned[reference] = _Owned(State.FAILED, error=refusal)
        elif reference.created_on != self._me and reference not in self._dropped:
            owned = self._owned[reference] = _Owned(State.PROMISED)
            if reference.created_on in self._lost:
                self._break_promise(reference, owned)
        return owned

    def _come_home(self, transfer: Transfer) -> None:
        reference, fork = transfer
        owned = self._known_or_promised(reference)
        if owned is None:
            raise ReferenceLost(f"{reference} came back to its owner after its value was dropped.")
        owned.handles += 1
        if fork.created_on == self._me:
            self._take_out(transfer, owned)
        else:
            self._post(fork.created_on, Unpin(fork))

    def _enter(self, transfer: Transfer, owned: _Owned, holder: int, teller: int) -> None:
        """A fork of that holder, of which `teller` told, comes into the table."""
        if teller != self._me:
            self._ledger.charge(teller)
        self._take_out(transfer, owned)
        owned.holders[transfer.fork] = holder
        if teller != holder:
            self._tellers[transfer] = teller

    def _take_out(self, transfer: Transfer, owned: _Owned) -> bool:
        """A fork leaves the table, if it is there."""
        holder = owned.holders.pop(transfer.fork, None)
        if holder is None:
            return False
        teller = self._tellers.pop(transfer, holder)
        if teller != self._me:
            self._ledger.credit(teller)
        return True

    def _release(self, transfer: Transfer) -> None:
        owned = self._owned.get(transfer.reference)
        if owned is not None and self._take_out(transfer, owned):
            self._drop_unheld(transfer.reference, owned)

    def _drop_unheld(self, reference: ReferenceId, owned: _Owned) -> None:
        if not owned.handles and not owned.holders:
            del self._owned[reference]
            self._actions.append(Drop(reference))
            if reference.created_on != self._me and owned.state is not State.PROMISED:
                # Who drops what others still use (a shutdown) may be overtaken by its own fetch,
                # which is not to wait for a value that has been.
                _remember(self._dropped, reference, None)

    # Membership

    @property
    def has_losses(self) -> bool:
        """Whether a message may begin a fence, so that all who live have to be announced."""
        return bool(self._lost)

    def worker_joined(self, worker: int) -> None:
        if worker != self._me and worker not in self._lost:
            self._live.add(worker)

    def worker_lost(self, worker: int, reason: str) -> None:
        """From here on nothing is accepted from `worker`. A worker that left in peace is lost too;
        if it dropped all it held, that costs no message."""
        if worker in self._lost:
            return
        self._lost[worker] = reason
        self._live.discard(worker)
        self._lose_values_of(worker)
        self._register_for(worker)
        for owner in self._asked.pop(worker, ()):
            self._post(owner, Fenced(worker))
        self._break_promises_of(worker)
        self._extend_fences(worker)

    def _lose_values_of(self, owner: int) -> None:
        for fork, held in list(self._held.items()):
            if held.reference.owner == owner:
                self._lose(fork, held, self._owner_lost(held.reference))

    def _lose(self, fork: ForkId, held: _Held, error: ReferenceLost) -> None:
        held.standing = _Standing.LOST
        for child in held.pins:
            del self._pins[child]
        held.pins.clear()
        if not held.dropped:
            self._actions.append(Lost(fork, error))
        self._release_if_done(fork, held)

    def _register_for(self, lost: int) -> None:
        for fork, pin in self._pins.items():
            if pin.to == lost:
                reference = self._held[pin.parent].reference
                self._post(reference.owner, Register(Transfer(reference, fork), lost))

    def _break_promises_of(self, lost: int) -> None:
        for reference, owned in self._owned.items():
            if reference.created_on == lost and owned.state is State.PROMISED:
                self._break_promise(reference, owned)

    def _break_promise(self, reference: ReferenceId, owned: _Owned) -> None:
        creator = reference.created_on
        owned.state = State.FAILED
        owned.error = LostWithWorker.saying(
            f"Worker {creator} was lost ({self._lost[creator]}) before its request to create "
            f"this value arrived at worker {self._me}.",
            str(creator),
            self._lost[creator],
        )
        self._actions.append(Failed(reference))

    # Fences

    def _answer_fence(self, owner: int, worker: int) -> None:
        if worker in self._lost:
            self._post(owner, Fenced(worker))
        else:
            self._asked.setdefault(worker, set()).add(owner)

    def _extend_fences(self, lost: int) -> None:
        """Open fences wait for `lost` no more, but for all that it may have passed on."""
        if self._awaited:
            self._awaited = {(live, of) for live, of in self._awaited if live != lost}
            self._ask_fences((lost,))
        elif self._holds_of_unfenced():
            self._begin_fences()

    def _begin_fences(self) -> None:
        if not self._awaited:
            self._ask_fences(tuple(self._lost.keys() - self._fenced))

    def _ask_fences(self, lost: tuple[int, ...]) -> None:
        for live in self._live:
            self._awaited.update((live, worker) for worker in lost)
            self._post(live, Fence(lost))
        self._end_fences_if_answered()

    def _end_fences_if_answered(self) -> None:
        if self._awaited:
            return
        self._fenced.update(self._lost)
        for reference, owned in list(self._owned.items()):
            gone = [fork for fork, holder in owned.holders.items() if holder in self._fenced]
            for fork in gone:
                self._release(Transfer(reference, fork))

    def _holds_of_unfenced(self) -> bool:
        unfenced = self._lost.keys() - self._fenced
        return any(
            holder in unfenced
            for owned in self._owned.values()
            for holder in owned.holders.values()
        )

    # What the rest stands on

    def debug_info(self) -> dict[str, int]:
        """Counts. In a worker that is idle and drops everything they all come to zero."""
        unconfirmed = sum(h.standing is _Standing.UNCONFIRMED for h in self._held.values())
        return {
            "owned": len(self._owned),
            "handles": sum(owned.handles for owned in self._owned.values()),
            "shared": sum(bool(owned.holders) for owned in self._owned.values()),
            "forks": sum(len(owned.holders) for owned in self._owned.values()),
            "held": len(self._held),
            "unconfirmed": unconfirmed,
            "pins": len(self._pins),
            "fences": len(self._awaited),
        }

    def _post(self, to: int, message: Message) -> None:
        if to == self._me:
            self.receive(to, message)
        elif to not in self._lost:
            self._actions.append(Post(to, message))

    def _require_live(self, worker: int) -> None:
        if worker in self._lost:
            raise WorkerLost.saying(
                f"No reference can go to worker {worker}: it is lost ({self._lost[worker]}).",
                str(worker),
                self._lost[worker],
            )

    def _require_not_fenced(self, sender: int) -> None:
        if sender in self._lost:
            raise WorkerLost.saying(
                f"A reference arrived from worker {sender} after it was lost "
                f"({self._lost[sender]}): ignore the message that carried it.",
                str(sender),
                self._lost[sender],
            )

    def _owner_lost(self, reference: ReferenceId) -> LostWithWorker:
        owner = reference.owner
        return LostWithWorker.saying(
            f"Worker {owner}, which owns this value, is lost ({self._lost[owner]}).",
            str(owner),
            self._lost[owner],
        )


def _remember(memory: dict[ReferenceId, T], reference: ReferenceId, value: T) -> None:
    """Note something of a value that is not here. What was noted long ago is forgotten."""
    memory[reference] = value
    if len(memory) > MOST_REMEMBERED:
        del memory[next(iter(memory))]
