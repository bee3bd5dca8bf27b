"""Tells other workers that contexts were released, several at a time.

A context lives for one step of training, so a message for each release would be a message for each
step, and the next call would wait behind it. One census speaks for all contexts released before it
(see `container`), so the workers that knew them are told a little later, all at once. Late enough
to be rare beside calls, soon enough that nobody holds more than what a few steps have left.

A census lists the contexts that are still open. Where those are many, as many releases are waited
for, so that what one release costs does not grow with the contexts that are open beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from telegrad.autograd.context import Context

DELAY = 0.05
"""Seconds after which others are told at the latest."""
MOST_WAITING = 64
"""So many contexts are not waited for any longer, if not more are open."""


class Releases:
    """The released contexts of one worker that others may still hold."""

    def __init__(self, runtime: Any, tell: Callable[[set[int]], None]) -> None:
        self._runtime = runtime
        self._tell = tell
        self._lock = threading.Lock()
        self._workers: set[int] = set()
        self._waiting = 0
        self._timed = False

    def add(self, context: Context, still_open: int) -> None:
        """A context was released here: see to it that those who know it are told."""
        if not context.known_workers:
            return
        with self._lock:
            self._workers |= context.known_workers
            self._waiting += 1
            crowded = self._waiting >= max(MOST_WAITING, still_open)
            begins = not self._timed
            self._timed = True
        if begins:
            self._runtime.call_later(DELAY, self._time_is_up)
        if crowded:
            self._flush()

    def _time_is_up(self) -> None:
        with self._lock:
            self._timed = False
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            workers, self._workers = self._workers, set()
            self._waiting = 0
        if workers:
            self._tell(workers)
