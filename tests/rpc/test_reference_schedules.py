"""References under random schedules: the protocol holds, and a broken one is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from telegrad.rpc.reference_messages import Fenced, Release, Transfer, Unpin
from telegrad.rpc.references import Post, References, _Standing
from tests.rpc.reference_schedules import run_seeds


def test_lifetime_is_exact_under_random_schedules_and_deaths():
    run_seeds(range(2000))


def release_despite_pins(self: References, fork, held) -> None:
    if held.dropped and held.standing is not _Standing.UNCONFIRMED:
        del self._held[fork]
        if held.standing is _Standing.CONFIRMED:
            self._post(held.reference.owner, Release(Transfer(held.reference, fork)))


def leave_a_late_answer_alone(self: References, created: Transfer) -> None:
    self._confirm(created.fork)


def share_home_without_pin(self: References, handle, to) -> Transfer:
    transfer = share(self, handle, to)
    if transfer.reference.owner == to != self._me:
        self._unpin(transfer.fork)
    return transfer


def hand_out_without_record(self: References, handle, to) -> Transfer:
    transfer = share(self, handle, to)
    if transfer.reference.owner == self._me != to:
        del self._owned[handle].holders[transfer.fork]
    return transfer


def end_fences_at_once(self: References, lost) -> None:
    self._end_fences_if_answered()


def end_each_fence_alone(self: References) -> None:
    unanswered = {of for _, of in self._awaited}
    self._fenced.update(self._lost.keys() - unanswered)
    for reference, owned in list(self._owned.items()):
        for fork, holder in list(owned.holders.items()):
            if holder in self._fenced:
                self._release(Transfer(reference, fork))


def ask_only_about_holders(self: References) -> None:
    holders = {holder for owned in self._owned.values() for holder in owned.holders.values()}
    if not self._awaited:
        self._ask_fences(tuple((self._lost.keys() - self._fenced) & holders))


def forget_the_second_lost(self: References, lost) -> None:
    if self._awaited:
        self._awaited = {(live, of) for live, of in self._awaited if live != lost}
        self._end_fences_if_answered()
    elif self._holds_of_unfenced():
        self._begin_fences()


def answer_before_being_fenced(self: References, owner, worker) -> None:
    self._post(owner, Fenced(worker))


def unpin_lost_children(self: References, lost) -> None:
    for fork in [fork for fork, pin in self._pins.items() if pin.to == lost]:
        self._unpin(fork)


def keep_pins_of_lost_children(self: References, lost) -> None:
    pass


def accept_from_the_lost(self: References, sender) -> None:
    pass


def register_without_telling_the_parent(self: References, sender, message) -> None:
    register(self, sender, message)
    self._actions = [
        a for a in self._actions if not (isinstance(a, Post) and type(a.message) is Unpin)
    ]


def forget_to_drop(self: References, transfer) -> None:
    if owned := self._owned.get(transfer.reference):
        owned.holders.pop(transfer.fork, None)


share, register = References.share, References._register


BROKEN = [
    ("_release_if_done", release_despite_pins),
    ("create_answered", leave_a_late_answer_alone),
    ("share", share_home_without_pin),
    ("share", hand_out_without_record),
    ("_ask_fences", end_fences_at_once),
    ("_end_fences_if_answered", end_each_fence_alone),
    ("_begin_fences", ask_only_about_holders),
    ("_extend_fences", forget_the_second_lost),
    ("_answer_fence", answer_before_being_fenced),
    ("_register_for", unpin_lost_children),
    ("_register_for", keep_pins_of_lost_children),
    ("_require_not_fenced", accept_from_the_lost),
    ("_register", register_without_telling_the_parent),
    ("_release", forget_to_drop),
]


@pytest.mark.parametrize(("rule", "broken"), BROKEN, ids=[broken.__name__ for _, broken in BROKEN])
def test_the_simulation_catches_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch, rule: str, broken: Callable[..., object]
):
    monkeypatch.setattr(References, rule, broken)
    with pytest.raises(AssertionError, match="replays it"):
        run_seeds(range(3000))
