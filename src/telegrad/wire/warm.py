"""Memory for large tensors that arrive by a stream, used again while its pages are warm.

A fresh page costs more than the copy into it, and memory of this size goes back to the kernel as
soon as it is freed. So blocks are kept: when the last tensor in one has died, the next tensor of
its size class is read into it.

- A block is lent from `array` until nothing refers to that array any more. Every view of it, and
  every tensor on it, refers to that very object, as it stands on foreign memory (see `arena.py`).
- The word that an array died may come inside of a garbage collection, on any thread, while that
  thread holds any lock. So it only appends to a deque; who next wants a block sorts it in.
- Idle blocks never exceed `limit` bytes in all, and the oldest are let go first. `trim` lets go
  what lay idle for a `PERIOD`. A timer calls it.
- Blocks are private: a process that is forked has copies, and two processes never one block.

A block that is lent twice would be one tensor's bytes in another: that must never happen.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections import OrderedDict, deque
from functools import partial

import numpy as np
import numpy.typing as npt

from telegrad.wire.arena import size_class

LEAST = 1 << 20
LIMIT = 256 << 20
PERIOD = 10.0

Bytes = npt.NDArray[np.uint8]


class WarmMemory:
    """A pool of blocks. Any thread may call anything."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        self._returned: deque[tuple[int, mmap.mmap]] = deque()
        self._idle: OrderedDict[int, tuple[mmap.mmap, float]] = OrderedDict()
        self._idle_bytes = 0
        self._numbers = 0

    def array(self, size: int) -> Bytes:
        """An array of that many bytes, whatever they are."""
        if size < LEAST:
            return np.empty(size, np.uint8)
        size_of_block = size_class(size)
        with self._lock:
            dropped = self._take_back(time.monotonic())
            block = self._take(size_of_block)
            number = self._numbers = self._numbers + 1
        # The kernel is called without the lock, to give memory back as well.
        dropped.clear()
        if block is None:
            block = mmap.mmap(-1, size_of_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(block, np.uint8, size)
        self._lent[number] = weakref.ref(array, partial(self._died, number, block))
        return array

    def trim(self) -> int:
        """Let go what nobody wanted for a while; the bytes that are still kept."""
        with self._lock:
            now = time.monotonic()
            dropped = self._take_back(now)
            while self._idle and self._oldest() < now - PERIOD:
                dropped.append(self._drop_oldest())
            kept = self._idle_bytes
        dropped.clear()
        return kept

    def _died(self, number: int, block: mmap.mmap, _: weakref.ref[Bytes]) -> None:
        self._returned.append((number, block))

    def _take(self, size: int) -> mmap.mmap | None:
        for number, (block, _) in reversed(self._idle.items()):
            if len(block) == size:
                del self._idle[number]
                self._idle_bytes -= size
                return block
        return None

    def _take_back(self, now: float) -> list[mmap.mmap]:
        """Sort in what has died; what is too much now."""
        while self._returned:
            number, block = self._returned.popleft()
            del self._lent[number]
            self._idle[number] = block, now
            self._idle_bytes += len(block)
        dropped: list[mmap.mmap] = []
        while self._idle_bytes > self._limit:
            dropped.append(self._drop_oldest())
        return dropped

    def _drop_oldest(self) -> mmap.mmap:
        _, (block, _) = self._idle.popitem(last=False)
        self._idle_bytes -= len(block)
        return block

    def _oldest(self) -> float:
        return next(iter(self._idle.values()))[1]


warm = WarmMemory()
"""That of this process."""
