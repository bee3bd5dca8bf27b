"""Sending: a message becomes a frame, by the way that suits its tensors.

A large tensor travels through the process group of the connection, or half of it by its lane, or in
shared memory, or inline, whichever there is first. Shared memory is copied to; by the other ways
the frame refers to the tensor's own memory, and `send` stays until that has been handed over: when
it returns, the caller may change its tensors.

What is kept for a resend has to be what was sent. A tensor's version counter, and where it lies,
tell whether it was changed since (`connection.Borrowed`); what nobody could tell that of is copied
before it is kept.

A frame whose large tensors travel beside the stream is kept for a resend in another shape, with all
of them inline: what is beside a stream breaks with it.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from telegrad.wire import interrupts
from telegrad.wire.connection import SMALL_FRAME, Borrowed, Bytes, LinkClosed, Turn, place_of
from telegrad.wire.frames import HEADER, HEADER_SIZE, INLINE, SLOT, head_of
from telegrad.wire.group import GroupFailed, TensorGroup, Transfer
from telegrad.wire.lane import Lane, are_large, cut
from telegrad.wire.outbox import LATER_BYTES, QUEUE_BYTES, Outbox, size_of
from telegrad.wire.quick import depart

ARENA_THRESHOLD = 1 << 16
MAX_FREED_PER_FRAME = 512
_nbytes_of = attrgetter("nbytes")


class Message(NamedTuple):
    """What is to be sent, before it is numbered."""

    kind: int
    call_id: int
    meta: bytes
    buffers: Sequence[memoryview]
    tensors: Sequence[Tensor]
    note: bytes
    untracked: int = 0
    """So many of the buffers, the last ones, have no version counter."""

    def trackable(self) -> Message:
        """As it may be kept."""
        buffers, tensors = _trackable(self.buffers, self.tensors, self.untracked)
        return self._replace(buffers=buffers, tensors=tensors, untracked=0)

    def head(self, rows: Sequence[tuple[int, int]], seq: int, ack: int, inline: int) -> bytes:
        return head_of(self.kind, self.call_id, self.meta, self.note, rows, seq, ack, inline)

    def whole(self, seq: int, ack: int) -> Borrowed:
        """The frame as it would be sent again: with all of its buffers inline."""
        rows = [(buffer.nbytes, INLINE) for buffer in self.buffers]
        head = self.head(rows, seq, ack, sum(size for size, _ in rows))
        return Borrowed((head, *self.buffers), _versions(self.tensors))


class Sending(Outbox):
    """The writing half of a link."""

    def send(
        self,
        kind: int,
        call_id: int,
        meta: bytes = b"",
        buffers: Sequence[memoryview] = (),
        note: bytes = b"",
        tensors: Sequence[Tensor] = (),
        later: bool = False,
        deadline: float = math.inf,
        untracked: int = 0,
    ) -> None:
        """Send one frame. `later`: leave it on the queue for the next send or flush. `untracked`:
        so many of the buffers, the last ones, are no tensors'.

        At the `deadline` (of `time.monotonic`) it returns although the peer does not read: the rest
        of the frame, copied, stays on the queue.
        """
        inline, rows = buffers, None
        if not later:
            # As nearly all are: short without what is in shared memory, and nobody else writes; the
            # rest of this is for the others.
            left = depart(self, kind, call_id, note, meta, buffers, None, SMALL_FRAME)
            if left is None and buffers and self._may_share():
                inline, rows = self._placed(buffers)
                if len(inline) < len(buffers):
                    left = depart(self, kind, call_id, note, meta, inline, rows, SMALL_FRAME)
            if left is True:
                return
            if left is not None:
                self._write_queue(left[0], deadline, left[1])
                return
        message = Message(kind, call_id, meta, buffers, tensors, note, untracked)
        if rows is None:
            if buffers and (
                self._send_by_group(message, deadline) or self._send_by_lane(message, deadline)
            ):
                return
            inline, rows = self._placed(buffers)
        self._send_in_parts(message, inline, rows, later, deadline)

    def _may_share(self) -> bool:
        """Whether large buffers go to shared memory, and not beside the stream."""
        return self._arena is not None and self._group is None and self._lane is None

    def _send_in_parts(
        self,
        message: Message,
        inline: Sequence[memoryview],
        rows: Sequence[int],
        later: bool,
        deadline: float,
    ) -> None:
        """Send a frame of which some may be in the arena, or in memory of the user's tensors."""
        kind, call_id, meta, buffers, tensors, note, untracked = message
        size = len(meta) + len(note) + SLOT * len(rows) + sum(map(_nbytes_of, inline))
        own_memory = size <= SMALL_FRAME or not inline
        if not own_memory:
            placed = rows[1::2][len(buffers) - untracked :]
            inline, tensors = _trackable(inline, tensors, placed.count(INLINE))
            versions = _versions(tensors)
        with self._lock:
            if self.closed:
                raise LinkClosed("the link is closed")
            freed = self._take_freed()
            table = struct.pack(f"<{len(rows) + len(freed)}Q", *rows, *freed)
            total = size + SLOT * len(freed)
            counts = (kind, 0, len(note), len(buffers), len(freed), len(meta), total)
            # What fails from here must not: a number that is given and not kept ends the session.
            seq, ack = self.session.stamp()
            start = b"".join((HEADER.pack(*counts, seq, ack, call_id), table, note, meta))
            kept: bytes | Borrowed
            parts: Sequence[Bytes]
            if own_memory:
                kept = b"".join((start, *inline))
                parts = (kept,)
            else:
                kept = Borrowed((start, *inline), versions)
                parts = kept.parts
            self._put(seq, kept, total, parts, HEADER_SIZE + total)
            turn = self._become_writer(own_memory, later, deadline)
        if turn is not None:
            self._write_queue(turn, deadline)

    def _become_writer(self, own_memory: bool, later: bool, deadline: float) -> Turn | None:
        """After a frame was queued: what the caller is to write, if it is to write. With the lock
        held."""
        if self._writing:
            if not own_memory or self._queued_bytes > QUEUE_BYTES:
                self._await_written(self._ticket, deadline)
            return None
        if self.broken or (later and own_memory and self._queued_bytes < LATER_BYTES):
            return None
        return self._take_turn()

    def _placed(self, buffers: Sequence[memoryview]) -> tuple[list[memoryview], list[int]]:
        """Those that go inline, and the numbers of the frame's table. All others are copied to
        shared memory, as far as there is room."""
        inline: list[memoryview] = []
        rows: list[int] = []
        for buffer in buffers:
            size = buffer.nbytes
            place = None
            if size >= ARENA_THRESHOLD and self._arena is not None:
                place = self._arena.place(buffer)
            if place is None:
                place = INLINE
                inline.append(buffer)
            else:
                self.sent_bytes += size
            rows.append(size)
            rows.append(place)
        return inline, rows

    def _take_freed(self) -> list[int]:
        """With the lock held: all who send take from there."""
        freed: list[int] = []
        while self.freed and len(freed) < MAX_FREED_PER_FRAME:
            freed.append(self.freed.popleft())
        if not self.freed:
            self._freed_since = math.inf
        return freed

    # Beside the stream.

    def _send_by_group(self, message: Message, deadline: float) -> bool:
        """Send large buffers through the process group. False: they have to go by another way."""
        group = self._group
        if group is None or not group.carries(message.buffers):
            return False
        message = message.trackable()
        try:
            with group.order:
                rows, inline, transfers = group.begin(message.buffers)
                with self._lock:
                    if not self._has_beside(group):
                        return False
                    kept, ticket, turn = self._put_beside(message, rows, inline)
        except GroupFailed:
            self._break_with(group)
            return False
        try:
            self._carry(ticket, turn, deadline)
        finally:
            # Also if that failed: gloo may still read the tensors, which the caller may change.
            self._await_transfers(group, transfers, kept, deadline)
        return True

    def _send_by_lane(self, message: Message, deadline: float) -> bool:
        """Send large buffers in two parts. False: there is no lane for that."""
        if not are_large(buffer.nbytes for buffer in message.buffers):
            return False
        lane = self._lane
        if lane is None or not lane.is_ready:
            self._ask_for_lane()
            return False
        message = message.trackable()
        rows, inline, beside = cut(message.buffers)
        with self._lock:
            if not self._has_beside(lane):
                return False
            _, ticket, turn = self._put_beside(message, rows, inline)
            # In one step with the frame: on the lane the parts come in the order of their frames.
            last = lane.put(beside)
        lane.go()
        self._carry(ticket, turn, deadline)
        lane.await_sent(last, deadline)
        return True

    def _has_beside(self, beside: TensorGroup | Lane) -> bool:
        """Whether that is still beside the stream. With the lock held."""
        if self.closed:
            raise LinkClosed("the link is closed")
        return not self.broken and (beside is self._group or beside is self._lane)

    def _put_beside(
        self, message: Message, rows: Sequence[tuple[int, int]], inline: Sequence[memoryview]
    ) -> tuple[Borrowed, int, Turn | None]:
        """Number a frame and queue what stays in it. How it is kept, its ticket, and what is to be
        written by the caller, if that has become the writer. With the lock held."""
        seq, ack = self.session.stamp()
        here = sum(part.nbytes for part in inline)
        head, kept = message.head(rows, seq, ack, here), message.whole(seq, ack)
        nbytes = sum(map(size_of, kept.parts)) - HEADER_SIZE
        self._put(seq, kept, nbytes, (head, *inline), len(head) + here)
        self.sent_bytes += sum(size for size, _ in rows) - here
        return kept, self._ticket, None if self._writing else self._take_turn()

    def _carry(self, ticket: int, turn: Turn | None, deadline: float) -> None:
        if turn is not None:
            self._write_queue(turn, deadline)
        else:
            with self._lock:
                self._await_written(ticket, deadline)

    def _await_transfers(
        self, group: TensorGroup, transfers: list[Transfer], kept: Borrowed, deadline: float
    ) -> None:
        """Until the peer has the tensors. If it cannot be, they will go inline, by a resend."""
        try:
            for transfer in transfers:
                while not transfer.has_ended(interrupts.at_a_time(deadline - time.monotonic())):
                    if interrupts.has_put_off() or time.monotonic() >= deadline:
                        raise GroupFailed("the time for it was over before a tensor had arrived")
        except BaseException as error:
            # Also if the caller is interrupted: from now on it may change its tensors.
            with self._lock:
                kept.own()
            self._break_with(group)
            group.close()
            if not isinstance(error, GroupFailed):
                raise
            if self.closed:
                raise LinkClosed("the link was closed while a tensor was on its way") from None


def _trackable(
    buffers: Sequence[memoryview], tensors: Sequence[Tensor], untracked: int
) -> tuple[Sequence[memoryview], Sequence[Tensor]]:
    """Buffers to be sent, and the tensors whose memory they are, but for the last `untracked`.

    Nobody could tell whether a tensor of inference mode was changed since, nor an array of numpy or
    a bytearray: then copies are sent. Tensors with a version counter are never copied.
    """
    first = len(buffers) - untracked
    if any(map(Tensor.is_inference, tensors)):
        first, tensors = 0, ()
    if first == len(buffers):
        return buffers, tensors
    return [*buffers[:first], *map(_settled, buffers[first:])], tensors


def _settled(buffer: memoryview) -> memoryview:
    """Bytes that stay as they are. Not all that is read-only does: its owner may have another view
    of the same memory, to write to."""
    # numpy copies without the interpreter's lock.
    return buffer if isinstance(buffer.obj, bytes) else np.array(buffer).data


def _versions(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, int, int], ...]:
    return tuple((tensor, tensor._version, place_of(tensor)) for tensor in tensors)
