"""Counts that many threads keep."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Container


class Tally:
    """Numbers, one per worker, that many threads count up."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[int, int] = defaultdict(int)

    def add(self, worker: int, count: int = 1) -> None:
        with self._lock:
            self._counts[worker] += count

    def forget(self, worker: int) -> None:
        with self._lock:
            self._counts.pop(worker, None)

    def total(self, without: Container[int]) -> int:
        with self._lock:
            return sum(count for worker, count in self._counts.items() if worker not in without)
