"""What is to be done when calls are settled: futures get their results, and callbacks run.

Callbacks are code of users, and one may wait for what another does, of the same worker or of
another. So several calls are never left to one thread alone: if it has not come to the end of them
after a while, another one goes on with the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from telegrad.rpc.calls import Pending

PATIENCE = 0.005
"""Seconds until another thread is lent. Nearly all callbacks are over long before."""


class Completions:
    """Calls that are settled. `run` completes them."""

    def __init__(
        self,
        settled: Iterable[Pending],
        lend: Callable[[Callable[[], object]], None],
        call_later: Callable[[float, Callable[[], object]], object],
    ) -> None:
        self._left = deque(settled)
        self._lend = lend
        self._call_later = call_later

    def run(self) -> None:
        if len(self._left) > 1:
            self._call_later(PATIENCE, self._go_on)
        while True:
            # Of two threads that come for the same one, one finds the next.
            try:
                pending = self._left.popleft()
            except IndexError:
                return
            pending.complete()

    def _go_on(self) -> None:
        if self._left:
            self._lend(self.run)
