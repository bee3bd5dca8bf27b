"""Which passes of a context a worker has begun, without remembering them for ever.

A pass id is (initiator, number), the number counting the passes of that initiator in that context.
A worker is not told when a pass ends everywhere; it only knows when its own part is done. But an
initiator knows, and every message of a pass says how far it has come: *all passes of mine below
this number are over*. So a worker remembers, per initiator, that bound and the few passes at or
above it. What is below the bound is ignored by number alone.
"""

from __future__ import annotations

from telegrad.autograd.messages import NO_HISTORY, History

FAILED_KEPT = 64
"""So many failed passes are told of; older failures have reached everyone long since."""


class Passes:
    """The passes of one context on one worker. Guarded by the lock of the context."""

    __slots__ = ("_bounds", "_failed", "_own", "_own_live", "begun")

    def __init__(self) -> None:
        self.begun: tuple[int, ...] = ()
        """Passes that began here and may not be over."""
        self._bounds: dict[int, int] = {}
        self._own = 0
        self._own_live: set[int] = set()
        self._failed: list[int] = []

    def known(self) -> tuple[int, ...]:
        """Passes that do not wait for what leaves from now on: begun here, or lately over."""
        if not self._bounds:
            return self.begun
        return (*self.begun, *(bound - 1 for bound in self._bounds.values()))

    def begin(self, pass_id: int) -> None:
        self.begun = (*self.begun, pass_id)

    def is_over(self, pass_id: int) -> bool:
        initiator = pass_id >> 48
        return pass_id < self._bounds.get(initiator, 0)

    def over_below(self, bound: int) -> bool:
        """Learn that all passes of an initiator below `bound` (a pass id) are over."""
        initiator = bound >> 48
        if bound <= self._bounds.get(initiator, 0):
            return False
        self._bounds[initiator] = bound
        if self.begun:
            self.begun = tuple([p for p in self.begun if p >> 48 != initiator or p >= bound])
        return True

    def next_own(self, worker: int) -> int:
        """The id of the next pass that `worker`, which is this one, initiates."""
        self._own += 1
        pass_id = worker << 48 | self._own
        self._own_live.add(pass_id)
        return pass_id

    def own_history(self) -> History:
        """What the others are told of the passes that began here; nothing before the second."""
        return History(min(self._own_live), tuple(self._failed)) if self._own > 1 else NO_HISTORY

    def own_over(self, pass_id: int, failed: bool) -> int:
        """A pass that began here has ended; the bound below which all such passes have."""
        self._own_live.discard(pass_id)
        if failed:
            self._failed = [*self._failed[1 - FAILED_KEPT :], pass_id]
        return min(self._own_live, default=pass_id >> 48 << 48 | self._own + 1)
