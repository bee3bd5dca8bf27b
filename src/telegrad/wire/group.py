"""Large tensors over a process group of torch.distributed, beside the frames that announce them.

A job may choose (`tensors="gloo"`) that its large tensors travel by torch's own transport: where a
cluster has a network that NCCL or gloo knows best, or to put telegrad beside it. Each connection
between two workers then has a group of two, private to it: the program's own groups, default or
not, are left alone, and a worker that dies takes no group down but those with itself.

The rules:

1.  *The group belongs to the connection.* When either breaks, both are given up. The session goes
    on over a new connection with a new group, and what was not acknowledged is sent again, inline:
    a resend needs neither the old group nor that its transfers ended well.
2.  *A frame counts as arrived when its tensors have.* So a transfer that is cut leaves no trace, as
    with bytes that come inline.
3.  *Sends begin in the order of the frames, receives too.* Each has a number of its own (the tag),
    by which gloo matches them; NCCL knows no tags and matches by order. `order` is held while sends
    begin and their frame is numbered, never while anybody waits.
4.  *Nobody waits longer than the peer lives.* A peer that dies or falls silent is noticed by the
    layers above, as ever, and `close` ends the transfers. gloo does not end a wait for a transfer
    that had begun when its connection went, so nobody waits in gloo but two threads of the group's
    own; those leave when the time that such a transfer may take is over.
5.  *When `close` has returned, gloo touches no memory of ours.* Only then may a sender go, whose
    tensor would else be read while its owner changes it.

The two ends find each other through the connection itself, after the handshake: what they tell each
other is as authentic as all else that they say. The group's own traffic is neither encrypted nor
authenticated, so a job that speaks TLS cannot choose one.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from telegrad.wire import torch_private
from telegrad.wire.at_exit import leave_threads_behind
from telegrad.wire.frames import GROUP, INLINE
from telegrad.wire.warm import warm

BACKENDS = ("gloo", "nccl")
THRESHOLD = 1 << 16
TAGS = 1 << 30
_LEAST_LIMIT = 60.0
_PATIENCE_AT_EXIT = 2.0
_SLOWEST = 1 << 20
_AT_ONCE = timedelta(milliseconds=1)
_LAST_TAG = TAGS + 1
_HEAD = struct.Struct("<BII")
_MOST = 1 << 16


class GroupFailed(ConnectionError):
    """A transfer did not end well, or the group could not be made."""


class Wire(Protocol):
    """The connection while the two ends form a group."""

    def write(self, data: bytes) -> None: ...
    def read_exactly(self, count: int) -> bytes: ...


class _Backend:
    """The way into torch's C++. A thread that is in there when the interpreter ends, and comes back
    to no interpreter, aborts the process: so at the end nobody enters, and who is in is awaited.
    Works and groups are let go in there, too: their destructors wait for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_shut = False
        self._groups: weakref.WeakSet[TensorGroup] = weakref.WeakSet()
        atexit.register(self._shut)

    def __enter__(self) -> None:
        with self._changed:
            if self._is_shut:
                raise GroupFailed("the process is ending")
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def know(self, group: TensorGroup) -> None:
        self._groups.add(group)

    def _shut(self) -> None:
        for group in list(self._groups):
            group.close()
        with self._changed:
            self._is_shut = True
            rest = self._changed.wait_for(lambda: not self._inside, _PATIENCE_AT_EXIT)
        if not rest:
            leave_threads_behind()


_backend = _Backend()


class Transfer:
    """A send or a receive that is under way. Its memory stays until gloo is done with it."""

    def __init__(self, work: dist.Work, memory: Tensor) -> None:
        self._work: dist.Work | None = work
        self._memory = memory
        self._ended = threading.Event()
        self._error: str | None = None

    def has_ended(self, seconds: float | None) -> bool:
        """Whether it ends in that time. `GroupFailed` if it did not end well."""
        ended = self._ended.wait(seconds)
        if self._error is not None:
            raise GroupFailed(self._error)
        return ended

    def follow(self) -> None:
        """Wait in gloo, for as long as the slowest network may take."""
        limit = timedelta(seconds=_LEAST_LIMIT + self._memory.nbytes / _SLOWEST)
        try:
            with _backend:
                try:
                    assert self._work is not None
                    self._work.wait(limit)
                finally:
                    self._work = None
        except (RuntimeError, GroupFailed) as error:
            self.fail(str(error))
        else:
            self._ended.set()

    def fail(self, why: str) -> None:
        if not self._ended.is_set():
            self._error = why
            self._ended.set()


class Arrival:
    """Bytes that come under a tag. Whoever waits may go, and another wait on for the same."""

    def __init__(self, array: npt.NDArray[np.uint8], target: Tensor, transfer: Transfer) -> None:
        self.array = array
        self._target = target
        self._transfer = transfer

    def is_here(self, seconds: float) -> bool:
        """Whether `array` holds them, after that time at the latest."""
        if not self._transfer.has_ended(seconds):
            return False
        if self._target.device.type != "cpu":
            torch.from_numpy(self.array).copy_(self._target)
        return True


class _Follower:
    """A thread that waits for transfers one after the other, so that others need not wait so."""

    def __init__(self) -> None:
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        threading.Thread(target=self._live, name="telegrad-group", daemon=True).start()

    def take(self, transfer: Transfer) -> Transfer:
        self._transfers.put(transfer)
        return transfer

    def leave(self) -> None:
        self._transfers.put(None)

    def _live(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            transfer.follow()


class TensorGroup:
    """One end of a group of two. One thread receives at a time; any may send."""

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        self.order = threading.Lock()
        self._group = group
        self._peer = peer
        self._device = device
        self._tag = 0
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._is_closed = False
        self._under_way: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._sending, self._receiving = _Follower(), _Follower()
        _backend.know(self)

    def carries(self, buffers: Sequence[memoryview]) -> bool:
        """Whether some of them are large enough to go this way."""
        return any(buffer.nbytes >= THRESHOLD for buffer in buffers)

    def begin(
        self, buffers: Sequence[memoryview]
    ) -> tuple[list[tuple[int, int]], list[memoryview], list[Transfer]]:
        """Begin to send what is large, with `order` held.

        The rows of the frame's table, what stays in the frame, and what is under way.
        """
        rows: list[tuple[int, int]] = []
        inline: list[memoryview] = []
        transfers: list[Transfer] = []
        for buffer in buffers:
            if buffer.nbytes < THRESHOLD:
                inline.append(buffer)
                rows.append((buffer.nbytes, INLINE))
            else:
                self._tag = (self._tag + 1) % TAGS
                source = torch.from_numpy(np.frombuffer(buffer, np.uint8)).to(self._device)
                transfers.append(self._sending.take(self._begin("send", source, self._tag)))
                rows.append((buffer.nbytes, GROUP + self._tag))
        return rows, inline, transfers

    def expect(self, tag: int, size: int) -> Arrival:
        """Begin to receive the bytes that were sent under a tag."""
        array = warm.array(size)
        target = torch.from_numpy(array).to(self._device)
        return Arrival(array, target, self._receiving.take(self._begin("recv", target, tag)))

    def _begin(self, way: str, memory: Tensor, tag: int) -> Transfer:
        try:
            with self._lock:
                if self._is_closed:
                    raise GroupFailed("the process group was closed")
                with _backend:
                    work = getattr(self._group, way)([memory], self._peer, tag)
                transfer = Transfer(work, memory)
                self._under_way.add(transfer)
                return transfer
        except RuntimeError as error:
            raise GroupFailed(str(error)) from None

    def close(self) -> None:
        """Give the group up: who waits for a transfer is told so. Any thread may, repeatedly."""
        with self._closing:
            with self._lock:
                was_closed, self._is_closed = self._is_closed, True
            if was_closed:
                return
            with contextlib.suppress(GroupFailed), _backend:
                self._end_transfers()
                self._group = None
            for transfer in list(self._under_way):
                transfer.fail("the process group was closed")
            self._sending.leave()
            self._receiving.leave()

    def _end_transfers(self) -> None:
        """A wait that runs out of time closes the connection below all of gloo's transfers; its
        `abort` leaves them alone."""
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device=self._device)
            self._group.recv([nothing], self._peer, _LAST_TAG).wait(_AT_ONCE)
        with contextlib.suppress(RuntimeError):
            self._group.abort()


# Forming a group.


def check_backend(name: str) -> None:
    """`ValueError` unless large tensors can travel by that name here."""
    if name not in BACKENDS:
        raise ValueError(f"tensors={name!r}: give one of {', '.join(map(repr, BACKENDS))}, or None")
    if not torch_private.has_backend(name):
        raise ValueError(f"tensors={name!r}: this build of torch {torch.__version__} has no {name}")


def form_group(backend: str, wire: Wire, rank: int, host: str) -> TensorGroup | None:
    """Make a group with the other end, which does the same with the other rank of 0 and 1.

    None: one of the two could not; then tensors travel inline. Errors of the wire are raised.
    """
    meeting = _MeetingByWire(wire)
    group = None
    try:
        with _backend:
            group = torch_private.group_of_two(backend, meeting, rank, host)
    except (RuntimeError, ValueError) as error:
        if meeting.broken is not None:
            raise meeting.broken from error
    if not meeting.agree(group is not None):
        return None
    try:
        return TensorGroup(group, 1 - rank, _device_of(backend))
    except RuntimeError as error:
        # No thread can be had for it. The other end hears of it as the connection ends.
        raise GroupFailed(str(error)) from None


def _device_of(backend: str) -> torch.device:
    return torch.device("cpu" if backend == "gloo" else "cuda")


class _Word(IntEnum):
    ENTRY = 0
    MADE = 1
    NOT_MADE = 2


class _MeetingByWire(Store):
    """A store of two: what one end sets, the other gets, through the connection between them."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.broken: OSError | None = None
        self._wire = wire
        self._entries: dict[str, bytes] = {}
        self._verdict: _Word | None = None

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = data
        self._say(_Word.ENTRY, key.encode(), data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not all(key in self._entries for key in keys):
            if self._verdict is not None:
                raise RuntimeError("the other end has no group")
            self._hear()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def agree(self, made: bool) -> bool:
        """Tell the other end whether the group is there, and hear whether both have one."""
        self._say(_Word.MADE if made else _Word.NOT_MADE, b"", b"")
        while self._verdict is None:
            self._hear()
        return made and self._verdict is _Word.MADE

    def _say(self, word: _Word, key: bytes, value: bytes) -> None:
        self._on_wire(
            lambda: self._wire.write(_HEAD.pack(word, len(key), len(value)) + key + value)
        )

    def _hear(self) -> None:
        word, key_size, size = _HEAD.unpack(self._on_wire(lambda: self._read(_HEAD.size)))
        if word not in set(_Word) or key_size + size > _MOST:
            self.broken = GroupFailed("the other end speaks of no group")
            raise self.broken
        rest = self._on_wire(lambda: self._read(key_size + size))
        if word == _Word.ENTRY:
            self._entries[rest[:key_size].decode(errors="replace")] = rest[key_size:]
        else:
            self._verdict = _Word(word)

    def _read(self, count: int) -> bytes:
        return self._wire.read_exactly(count) if count else b""

    def _on_wire(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except OSError as error:
            self.broken = error
            raise
