"""The rooms of a store in which jobs of fixed size meet, one after the other.

A store may outlive a job, and an attempt to start one. What an earlier attempt wrote must mislead
nobody, and workers that try again, each in its own time, must come together. So each attempt has a
room of its own, with a seat for each rank, and all use the first room that is not over. A room is
over when it has an *outcome*, under `members`:

- the list of all workers, or what is wrong with it: written by rank 0;
- that it was given up: written by a worker that fails or has waited long enough, or by one that
  finds its seat taken by a process that is gone.

The first to write an outcome is right (the store compares and sets in one step), so that rank 0
never counts on a worker that has gone: a worker joins where rank 0 has listed it, and whoever else
sat in a room that was given up moves on to the next, for as long as it may wait.

Nobody looks around in a loop. A worker waits for one entry at a time: `job` of rank 0, `ready` of
the last to take part, `members`. Who gives a room up writes all of them, the outcome first. Should
it die before it has written the rest, the next worker to come by does.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from telegrad.rpc.errors import RendezvousError
from telegrad.rpc.noticeboard import Noticeboard, not_ours

OUTCOME = "members"
READY = "ready"
JOB = "job"
_OVER = "rooms over"
"""How many are: at least so many, should one have died who was to count."""


class RoomGivenUp(Exception):
    """Somebody has given the room up: its workers move on to the next. No user sees this."""


class Room:
    """One room, as one worker sees it."""

    def __init__(self, whole: Noticeboard, number: int) -> None:
        self._whole = whole
        self.number = number
        self.board = whole.room(str(number))

    def settle(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """End the room in that way if it has not ended yet; how it ended."""
        # A mark of its own for each attempt, so that no room is counted twice: the count may lag,
        # but were it ahead, workers would pass by the room in which others wait.
        mine = json.dumps({**outcome, "mark": secrets.token_hex(8)})
        found = self.board.store.compare_set(OUTCOME, "", mine).decode(errors="replace")
        if found == mine:
            self._whole.store.add(_OVER, 1)
        try:
            return check_outcome(json.loads(found))
        except (ValueError, RecursionError):
            raise not_ours(OUTCOME) from None

    def give_up(self) -> dict[str, Any]:
        """End the room without a job if it has not ended yet; how it ended."""
        outcome = self.settle({"given up": True})
        if "given up" in outcome:
            self.tell_that_it_was_given_up()
        return outcome

    def tell_that_it_was_given_up(self) -> None:
        """Those who wait for anything in it have waited long enough."""
        notice = json.dumps({"given up": True})
        for key in (JOB, READY):
            self.board.store.compare_set(key, "", notice)

    def take_seat(self, rank: int, who: dict[str, Any]) -> Any:
        """Who had it before; None if nobody, and it is ours."""
        mine = json.dumps({**who, "incarnation": self._whole.incarnation})
        found = self.board.store.compare_set(f"seat {rank}", "", mine).decode(errors="replace")
        if found == mine:
            return None
        try:
            return json.loads(found)
        except (ValueError, RecursionError):
            raise not_ours(f"seat {rank}") from None


def open_room(whole: Noticeboard) -> Room:
    """The first room that is not over."""
    number = whole.store.add(_OVER, 0) + 1
    while True:
        room = Room(whole, number)
        if not room.board.store.check([OUTCOME]):
            return room
        if "given up" in check_outcome(room.board.read(OUTCOME)):
            room.tell_that_it_was_given_up()
        number += 1


def check_outcome(outcome: Any) -> dict[str, Any]:
    match outcome:
        case {"members": list()} | {"problem": str()} | {"given up": True}:
            return dict(outcome)
    raise not_ours(OUTCOME)


def unless_given_up(entry: Any) -> Any:
    """An entry of a room, if it does not say that the room was given up."""
    match entry:
        case {"given up": True}:
            raise RoomGivenUp
    return entry


def problem_of(outcome: dict[str, Any]) -> RendezvousError | None:
    return RendezvousError(outcome["problem"]) if "problem" in outcome else None
