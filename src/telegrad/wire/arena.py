"""Shared memory for the large tensors that travel between two processes of one host.

The sender owns an `Arena`, a memfd whose descriptor it passes to the receiver once. It copies a
tensor into a slot and sends the offset; the receiver's `ArenaView` makes an array of the slot
without a copy. When the last view of that array dies, the offset travels back and the slot is free.

- A slot belongs to the receiver from `place` until `release`: the sender neither reads nor writes
  it in between. A release of what was not lent is refused, for it would lend one slot twice.
- The file has its full size from the start and is sealed at it. It is sparse: what was never
  touched costs nothing. So addresses stay valid for ever, and the other process cannot shorten the
  file under our feet, which would kill us with SIGBUS. The receiver checks the seal.
- Fresh pages cost more than the copy into them. So slots are reused, the last freed first, while
  the caches and page tables of both processes still know them. Sizes come in four classes per power
  of two: a slot is reused for any tensor of its class, and wastes at most a quarter.
- When nothing fits, all free slots are merged and cut anew. When nothing fits then, `place` says
  so and the caller sends the bytes by the socket: the limit is the back-pressure.
- `trim` gives back the pages of slots that lay unused since the trim before. A timer calls it.

A memfd has no name: when the last process that holds it ends, in whatever way, it is gone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_PAGE_BITS = _PAGE.bit_length() - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaError(ValueError):
    """The other process named memory that is not its to name: the connection is to be ended."""


@dataclass(frozen=True)
class ArenaUse:
    """How full an arena is, in bytes. `idle` are free and still hold pages."""

    limit: int
    lent: int
    idle: int
    high_water: int
    refused: int


class Arena:
    """The sender's side. Any thread may call anything."""

    def __init__(self, limit_bytes: int) -> None:
        limit = limit_bytes // _PAGE * _PAGE
        if limit <= 0:
            raise ValueError(f"an arena of {limit_bytes} bytes does not hold one page of {_PAGE}")
        self.fd = os.memfd_create("telegrad-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, limit)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory: Bytes | None = np.frombuffer(mmap.mmap(self.fd, limit), np.uint8)
        self._lock = threading.Lock()
        self._slots = _Slots(limit)
        self._refused = 0

    def place(self, view: memoryview) -> int | None:
        """Copy the bytes of a contiguous view into a slot and lend it; None if there is no room."""
        memory = self._memory
        if view.nbytes == 0 or memory is None:
            return None
        source = np.frombuffer(view, np.uint8)
        with self._lock:
            offset = self._slots.take(source.size)
            if offset is None:
                self._refused += 1
                return None
        # numpy copies without the interpreter's lock.
        memory[offset : offset + source.size] = source
        return offset

    def release(self, offset: int) -> None:
        """Take back a slot; `ArenaError` if it was not lent."""
        with self._lock:
            self._slots.give_back(offset)

    def trim(self) -> int:
        """Return pages that went unused since the last trim to the system; tell how many bytes."""
        with self._lock:
            if self._memory is None:
                return 0
            spans = self._slots.withdraw_unused()
            # Without the lock a close could give our descriptor's number to another file.
            fd = os.dup(self.fd)
        try:
            before = _resident(fd)
            for offset, size in spans:
                _punch_hole(fd, offset, size)
            return max(0, before - _resident(fd))
        finally:
            os.close(fd)
            with self._lock:
                self._slots.return_cold(spans)

    @property
    def use(self) -> ArenaUse:
        with self._lock:
            slots = self._slots
            return ArenaUse(
                slots.limit, slots.lent_bytes, slots.idle_bytes, slots.high_water, self._refused
            )

    def close(self) -> None:
        """Let go of the memory. The receiver keeps what it holds; `place` answers None from now."""
        with self._lock:
            # Unmapped when a copy that is under way in another thread has ended.
            self._memory = None
            self._close_fd()


class _Slots:
    """Which parts of the file are lent, idle (free, pages warm) or open (free, uncut).

    Open spans are kept in order of their offset and never touch one another.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lent_bytes = 0
        self.idle_bytes = 0
        self.high_water = 0
        self._lent: dict[int, int] = {}
        self._idle: dict[int, list[int]] = {}
        # The fewest idle slots per class since the last trim: the bottom of each stack that
        # nobody reached.
        self._untouched: dict[int, int] = {}
        self._open: list[tuple[int, int]] = [(0, limit)]
        # Open spans that held slots once and may still hold their pages.
        self._open_warm = False
        self._too_large = limit + 1
        """What has no room, until something is given back: it is not looked for again."""

    def take(self, size: int) -> int | None:
        size = size_class(size)
        if size >= self._too_large or size > self.limit - self.lent_bytes:
            return None
        offset = self._pop_idle(size)
        if offset is None:
            offset = self._cut(size)
        if offset is None and self.idle_bytes:
            self._merge_idle()
            offset = self._cut(size)
        if offset is None:
            self._too_large = size
            return None
        self._lent[offset] = size
        self.lent_bytes += size
        self.high_water = max(self.high_water, self.lent_bytes)
        return offset

    def give_back(self, offset: int) -> None:
        size = self._lent.pop(offset, None)
        if size is None:
            raise ArenaError(f"the slot at offset {offset} was given back but is not lent")
        self.lent_bytes -= size
        self.idle_bytes += size
        self._idle.setdefault(size, []).append(offset)
        self._too_large = self.limit + 1

    def withdraw_unused(self) -> list[tuple[int, int]]:
        """Take the spans that were free all the time since the last call out of circulation."""
        spans = []
        for size, stack in self._idle.items():
            unused = self._untouched.get(size, 0)
            spans += [(offset, size) for offset in stack[:unused]]
            del stack[:unused]
            self.idle_bytes -= unused * size
            self._untouched[size] = len(stack)
        if self._open_warm:
            spans += self._open
            self._open = []
            self._open_warm = False
        return spans

    def return_cold(self, spans: list[tuple[int, int]]) -> None:
        if spans:
            self._open = _merged(sorted(self._open + spans))
            self._too_large = self.limit + 1

    def _pop_idle(self, size: int) -> int | None:
        stack = self._idle.get(size)
        if not stack:
            return None
        offset = stack.pop()
        if len(stack) < self._untouched.get(size, 0):
            self._untouched[size] = len(stack)
        self.idle_bytes -= size
        return offset

    def _cut(self, size: int) -> int | None:
        """First fit, so that what is used stays together at the low end."""
        for index, (offset, room) in enumerate(self._open):
            if room >= size:
                del self._open[index]
                if room > size:
                    insort(self._open, (offset + size, room - size))
                return offset
        return None

    def _merge_idle(self) -> None:
        idle = [(offset, size) for size, stack in self._idle.items() for offset in stack]
        self._open = _merged(sorted(self._open + idle))
        self._open_warm = True
        self._idle.clear()
        self._untouched.clear()
        self.idle_bytes = 0


def size_class(size: int) -> int:
    """The least slot size that holds `size`: four per power of two, whole pages."""
    quarter = 1 << max(_PAGE_BITS, (size - 1).bit_length() - 3)
    return -(-size // quarter) * quarter


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, size in spans:
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


class ArenaView:
    """The receiver's side: arrays on slots, and word when they die.

    `on_free(offset)` is called once per array, when nothing refers to its memory any more, in
    whichever thread that happens and possibly in the middle of a garbage collection. So it must not
    take a lock nor do anything but, say, append to a deque. It is called as long as the
    `ArenaView` lives and is not closed; arrays stay valid beyond that.
    """

    def __init__(self, fd: int, on_free: Callable[[int], None]) -> None:
        """Map the arena behind a descriptor, which stays the caller's to close."""
        seals = _seals(fd)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ArenaError("the shared memory offered is not sealed against shrinking")
        self.size = os.fstat(fd).st_size
        self._memory: mmap.mmap | None = mmap.mmap(fd, self.size)
        self._on_free = on_free
        self._watched: dict[int, weakref.ref[Bytes]] = {}

    def array(self, offset: int, length: int) -> Bytes:
        """The bytes of a slot as a writable array."""
        if self._memory is None:
            raise ArenaError("the shared memory was closed")
        if offset < 0 or length <= 0 or offset + length > self.size:
            raise ArenaError(
                f"{length} bytes at offset {offset} lie outside of the {self.size} bytes shared"
            )
        if offset in self._watched:
            raise ArenaError(f"the slot at offset {offset} is still in use here")
        array = np.frombuffer(self._memory, np.uint8, length, offset)
        # Every view of the array, and every tensor on it, refers to this very object: numpy
        # shortens chains of views only down to the array that stands on foreign memory.
        self._watched[offset] = weakref.ref(array, partial(self._died, offset))
        return array

    @property
    def in_use(self) -> int:
        """How many arrays live."""
        return len(self._watched)

    def close(self) -> None:
        """Make no more arrays and call `on_free` no more."""
        self._watched.clear()
        self._memory = None

    def _died(self, offset: int, _: weakref.ref[Bytes]) -> None:
        # First forget, then tell: once told, the slot may be lent again and watched anew.
        if self._watched.pop(offset, None) is not None:
            self._on_free(offset)


def _resident(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise


_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


def _punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the pages back; they read as zeros. The file keeps its size, as sealed."""
    if _libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
