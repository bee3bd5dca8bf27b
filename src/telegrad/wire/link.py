"""One session between two processes, carried by one byte stream at a time.

Writing. Any thread may send. A frame is numbered, kept for a possible resend and put on a queue
under a short lock; the thread that finds nobody writing becomes the writer and carries the queue to
the kernel outside of the lock. So no lock is held over a system call, and frames of many threads
leave in one call. A thread whose frame refers to a tensor's own memory stays until that memory has
been handed over: when `send` returns, the caller may change its tensors.

Reading. One thread at a time (who, is the business of the layer above). `receive` keeps what it has
read in the link, never on its stack: a receive that times out or is interrupted can be taken up by
another thread without a byte lost.

Breaking. When the stream breaks, the reader is told (`LinkBroken`); writers are not, because what
they sent is kept. `resume` puts a new stream below the session: each end resends what the other has
not seen. A frame counts as seen when all of it is here, and only then are its shared-memory slots
mapped or given back: a frame that is cut in the middle leaves no trace.

A connection may have a process group beside it (`group.py`), or a second connection (`lane.py`). A
frame whose large tensors travel by either is kept for a resend in another shape, with all of them
inline: what is beside a stream breaks with it.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from telegrad.wire.arena import Arena, ArenaError, ArenaView
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import (
    GROUP,
    HEADER,
    HEADER_SIZE,
    INLINE,
    KINDS,
    LIMITS,
    ROW,
    SLOT,
    Frame,
    FrameLimits,
    Kind,
    check_header,
    head_of,
)
from telegrad.wire.group import Arrival, GroupFailed, TensorGroup, Transfer
from telegrad.wire.lane import Lane, LanePart, Run, are_large, cut, inline_bytes, is_split
from telegrad.wire.primitives import ByteBuffer
from telegrad.wire.session import Session, SessionError
from telegrad.wire.stream import Stream
from telegrad.wire.warm import warm

READ_BUFFER = 1 << 18
SMALL_FRAME = 1 << 16
ARENA_THRESHOLD = 1 << 16
ONE_ROW = struct.Struct("<2Q")
QUEUE_BYTES = 8 << 20
LONGEST_WAIT = 3600.0
LATER_BYTES = 1 << 14
MAX_FREED_PER_FRAME = 512
ACK_FRAMES = 256
ACK_BYTES = 1 << 20
LIGHT = ACK_BYTES // ACK_FRAMES // 4
"""Frames below it are too small to make up `ACK_BYTES` before there are `ACK_FRAMES` of them."""
LOOK_EVERY = 64
CARRIED_TIMEOUT = 0.05

Bytes = bytes | memoryview
_NOTHING: Iterator[ByteBuffer] = iter(())


class LinkBroken(ConnectionError):
    """The stream ended. The session may go on over another one."""


class LinkClosed(ConnectionError):
    """The link was closed for good."""


@dataclass(slots=True)
class _Borrowed:
    """A frame that left with parts in the memory of the user's tensors, for a resend."""

    parts: tuple[Bytes, ...]
    tensors: tuple[tuple[Tensor, int], ...]

    def own(self) -> None:
        """Copy what belongs to the user, who may change it from now on."""
        self.parts, self.tensors = tuple(map(bytes, self.parts)), ()

    def unchanged(self) -> bool:
        return all(tensor._version == version for tensor, version in self.tensors)


@dataclass(slots=True)
class _Incoming:
    """A frame that does not fit the read buffer: each part is filled into its own memory."""

    header: tuple[int, ...]
    head: bytearray
    targets: deque[memoryview]
    filled: int = 0
    opened: bool = False
    arrays: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    arrivals: list[LanePart] = field(default_factory=list)


class Link:
    """Sends and receives frames; large tensors go beside them where both ends have a way."""

    def __init__(
        self,
        stream: Stream,
        *,
        arena: Arena | None = None,
        view: ArenaView | None = None,
        freed: deque[int] | None = None,
        limits: FrameLimits = LIMITS,
        group: TensorGroup | None = None,
        name: str = "",
    ) -> None:
        """`freed` is where `view` puts the slots that died here; `group` belongs to the stream, and
        so does `name`, by which both ends know it if it may have a lane."""
        self.stream = stream
        self.name = name
        self.session: Session[bytes | _Borrowed] = Session()
        self.closed = False
        self.broken = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._limits = limits
        self._unsuspicious = min(
            SMALL_FRAME, limits.frame_bytes, limits.meta_bytes, SLOT * limits.buffers
        )
        """A frame of so many bytes that has room for its parts cannot pass any limit."""
        self._arena = arena
        self._view = view
        self._group = group
        self._lane: Lane | None = None
        self.widen: Callable[[], None] | None = None
        """Called once, when a lane would have been of use."""
        self.while_blocked: Callable[[], None] = self._wait_writable
        self.nudge: Callable[[], None] = _nobody_looks
        self.freed: deque[int] = deque() if freed is None else freed

        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[Bytes] = []
        self._queued_bytes = 0
        self._writing = False
        self._awaiting = 0
        self._overdue = False
        self._ticket = 0
        self._tickets_written = 0

        # Not a bytearray, which would touch every page: most links of a large job are idle.
        self._window = np.empty(READ_BUFFER, np.uint8).data
        self._start = 0
        self._end = 0
        self._large: _Incoming | None = None
        self._arriving: list[Arrival] | None = None

    # Writing.

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
    ) -> None:
        """Send one frame. `later`: leave it on the queue for the next send or flush.

        At the `deadline` (of `time.monotonic`) it returns although the peer does not read: the rest
        of the frame, copied, stays on the queue.
        """
        group = self._group
        if group is not None and group.carries(buffers):
            frame = (kind, call_id, meta, buffers, note, tensors, deadline)
            if self._send_by_group(group, *frame):
                return
        if (
            buffers
            and (self._lane is not None or self.widen is not None)
            and are_large(buffer.nbytes for buffer in buffers)
            and self._send_split(kind, call_id, meta, buffers, note, tensors, deadline)
        ):
            return
        rows: list[int] = []
        inline: list[memoryview] = []
        total = len(meta) + len(note)
        if buffers:
            total += self._place(buffers, rows, inline)
        freed = self._take_freed() if self.freed else ()
        if len(rows) == 2 and not freed:
            head = ONE_ROW.pack(*rows)
        else:
            head = struct.pack(f"<{len(rows) + len(freed)}Q", *rows, *freed)
        total += len(head)
        counts = (kind, 0, len(note), len(buffers), len(freed), len(meta), total)
        own_memory = total <= SMALL_FRAME or not inline
        with self._lock:
            if self.closed:
                raise LinkClosed("the link is closed")
            seq, ack = self.session.stamp()
            header = HEADER.pack(*counts, seq, ack, call_id)
            if own_memory:
                whole = b"".join((header, head, note, meta, *inline))
                self.session.keep(seq, whole, total)
                self._queue.append(whole)
            else:
                borrowed = _Borrowed(
                    (b"".join((header, head, note, meta)), *inline),
                    tuple((tensor, tensor._version) for tensor in tensors),
                )
                self.session.keep(seq, borrowed, total)
                self._queue += borrowed.parts
            self._queued_bytes += HEADER_SIZE + total
            self._ticket += 1
            if self._writing:
                if not own_memory or self._queued_bytes > QUEUE_BYTES:
                    self._await_written(self._ticket, deadline)
                return
            if self.broken or (later and own_memory and self._queued_bytes < LATER_BYTES):
                return
            self._writing = True
            parts, size, ticket = self._take_queue()
        self._write_queue(parts, size, ticket, deadline)

    def _send_by_group(
        self,
        group: TensorGroup,
        kind: int,
        call_id: int,
        meta: bytes,
        buffers: Sequence[memoryview],
        note: bytes,
        tensors: Sequence[Tensor],
        deadline: float,
    ) -> bool:
        """Send a frame whose large buffers travel through the group. False: it has to be inline."""
        try:
            with group.order:
                rows, inline, transfers = group.begin(buffers)
                with self._lock:
                    if self.closed:
                        raise LinkClosed("the link is closed")
                    if self._group is not group or self.broken:
                        return False
                    seq, ack = self.session.stamp()
                    here = sum(map(_size, inline))
                    as_sent = head_of(kind, call_id, meta, note, rows, seq, ack, here)
                    kept = _kept_whole(kind, call_id, meta, buffers, note, tensors, seq, ack)
                    self.session.keep(seq, kept, sum(map(_size, kept.parts)) - HEADER_SIZE)
                    whole = b"".join((as_sent, *inline))
                    self._queue.append(whole)
                    self._queued_bytes += len(whole)
                    self.sent_bytes += sum(size for size, place in rows if place != INLINE)
                    self._ticket += 1
                    taken = None
                    if not self._writing:
                        self._writing = True
                        taken = self._take_queue()
        except GroupFailed:
            self._break_with(group)
            return False
        if taken is not None:
            self._write_queue(*taken, deadline)
        self._await_transfers(group, transfers, kept, deadline)
        return True

    def _await_transfers(
        self, group: TensorGroup, transfers: list[Transfer], kept: _Borrowed, deadline: float
    ) -> None:
        """Until the peer has the tensors. If it cannot be, they will go inline, by a resend."""
        try:
            for transfer in transfers:
                transfer.wait(None if deadline == math.inf else deadline - time.monotonic())
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

    def _break_with(self, group: TensorGroup) -> None:
        """A group failed, and the stream that it belongs to has to be made anew with it."""
        with self._lock:
            is_present = self._group is group
        if is_present:
            self.mark_broken()

    def _send_split(
        self,
        kind: int,
        call_id: int,
        meta: bytes,
        buffers: Sequence[memoryview],
        note: bytes,
        tensors: Sequence[Tensor],
        deadline: float,
    ) -> bool:
        """Send a frame whose large buffers travel in two parts. False: there is no lane for it."""
        lane = self._lane
        if lane is None or not lane.is_ready:
            self._ask_for_lane()
            return False
        rows, inline, beside = cut(buffers)
        with self._lock:
            if self.closed:
                raise LinkClosed("the link is closed")
            if self._lane is not lane or self.broken:
                return False
            seq, ack = self.session.stamp()
            here = sum(map(_size, inline))
            head = head_of(kind, call_id, meta, note, rows, seq, ack, here)
            kept = _kept_whole(kind, call_id, meta, buffers, note, tensors, seq, ack)
            self.session.keep(seq, kept, sum(map(_size, kept.parts)) - HEADER_SIZE)
            self._queue += (head, *inline)
            self._queued_bytes += len(head) + here
            self.sent_bytes += sum(map(_size, beside))
            self._ticket += 1
            ticket, taken = self._ticket, None
            # In one step with the frame: on the lane the parts come in the order of their frames.
            last = lane.put(beside)
            if not self._writing:
                self._writing = True
                taken = self._take_queue()
        lane.go()
        if taken is not None:
            self._write_queue(*taken, deadline)
        else:
            with self._lock:
                self._await_written(ticket, deadline)
        lane.await_sent(last, deadline)
        return True

    def _ask_for_lane(self) -> None:
        with self._lock:
            ask, self.widen = self.widen, None
        if ask is not None:
            ask()

    def attach(self, name: str, stream: Stream, run: Run) -> bool:
        """Have a lane over a second stream. False: the connection that it is for has none to have,
        or is gone."""
        with self._lock:
            if self.closed or self.broken or self._lane is not None or name != self.name:
                return False
            lane = self._lane = Lane(stream, run, lambda: self._break_with_lane(lane))
        lane.open()
        return True

    def _break_with_lane(self, lane: Lane) -> None:
        with self._lock:
            is_present = self._lane is lane
        if is_present:
            self.mark_broken()

    def flush(self, deadline: float = math.inf) -> None:
        """Write what was left on the queue."""
        if self._queue:
            with self._lock:
                if self._writing or self.closed or self.broken:
                    return
                self._writing = True
                parts, size, ticket = self._take_queue()
            self._write_queue(parts, size, ticket, deadline)

    @property
    def has_unwritten(self) -> bool:
        return bool(self._queue) and not self._writing and not self.broken

    def tidy(self) -> None:
        """Give back shared memory and acknowledge, without waiting for a message to ride on."""
        if self.freed:
            self.send(Kind.HOUSEKEEPING, 0)
        else:
            self.flush()

    def trim(self) -> None:
        """Give back to the system what large tensors have not used for a while."""
        if self._arena is not None:
            self._arena.trim()

    def _acknowledge(self) -> None:
        """Queue a frame that only acknowledges. The reader must not write: it might have to wait
        for room, and who makes room is the reader at the other end."""
        with self._lock:
            if self.closed or self.broken:
                return
            ack = self.session.acknowledge()
            self._queue.append(HEADER.pack(Kind.HOUSEKEEPING, 0, 0, 0, 0, 0, 0, 0, ack, 0))
            self._queued_bytes += HEADER_SIZE
        self.nudge()

    def _place(
        self, buffers: Sequence[memoryview], rows: list[int], inline: list[memoryview]
    ) -> int:
        total = 0
        for buffer in buffers:
            size = buffer.nbytes
            place = None
            if size >= ARENA_THRESHOLD and self._arena is not None:
                place = self._arena.place(buffer)
            if place is None:
                place = INLINE
                inline.append(buffer)
                total += size
            else:
                self.sent_bytes += size
            rows.append(size)
            rows.append(place)
        return total

    def _take_freed(self) -> list[int]:
        freed: list[int] = []
        while self.freed and len(freed) < MAX_FREED_PER_FRAME:
            freed.append(self.freed.popleft())
        return freed

    def _await_written(self, ticket: int, deadline: float) -> None:
        self._awaiting += 1
        try:
            while self._tickets_written < ticket and not self.broken:
                if self.closed:
                    raise LinkClosed("the link was closed while a message waited to be written")
                left = deadline - time.monotonic()
                self._overdue |= left <= 0
                self._changed.wait(min(left, LONGEST_WAIT) if left > 0 else None)
        finally:
            self._awaiting -= 1

    def _take_queue(self) -> tuple[list[Bytes], int, int]:
        """What is to be written now: the parts, their size, and the last ticket among them."""
        parts, self._queue = self._queue, []
        size, self._queued_bytes = self._queued_bytes, 0
        self.sent_bytes += size
        return parts, size, self._ticket

    def _write_queue(self, parts: list[Bytes], size: int, ticket: int, deadline: float) -> None:
        """Write what was taken from the queue, and then what has come to it, until it is empty. The
        caller has set `_writing`."""
        while True:
            try:
                rest = self._write(parts, size, deadline)
            except BaseException:
                self.mark_broken()
                with self._lock:
                    # Interrupted: from now on the caller may change its tensors.
                    for frame in self.session.unacknowledged():
                        if not isinstance(frame, bytes) and frame.unchanged():
                            frame.own()
                    self._writing = False
                    self._changed.notify_all()
                raise
            if rest:
                self._leave_unwritten(rest)
                return
            with self._lock:
                self._tickets_written = ticket
                if self._awaiting:
                    self._changed.notify_all()
                if not self._queue or self.broken or self.closed:
                    # In one step with the look at the queue: a frame that came before is seen, and
                    # who brings one after finds nobody writing.
                    self._writing = self._overdue = False
                    return
                parts, size, ticket = self._take_queue()

    def _leave_unwritten(self, rest: list[Bytes]) -> None:
        """Write no more for now. Callers are let go, so nothing may stay in their memory."""
        with self._lock:
            left = [bytes(view) for view in rest]
            self.sent_bytes -= sum(map(len, left))
            self._queue = [*left, *map(bytes, self._queue)]
            self._queued_bytes = sum(map(len, self._queue))
            self._tickets_written = self._ticket
            self._overdue = False
            self._writing = False
            self._changed.notify_all()
        self.nudge()

    def _write(self, views: list[Bytes], size: int, deadline: float) -> list[Bytes]:
        """Write until all is written, the stream breaks, or time is up; what is left then."""
        stream = self.stream
        if len(views) > 1 and size <= SMALL_FRAME:
            views = [b"".join(views)]
        while True:
            try:
                sent = stream.try_send(views)
            except OSError:
                self.mark_broken()
                return []
            size -= sent
            if size == 0:
                return []
            if sent == 0:
                self.while_blocked()
                if self.broken or self.closed:
                    return []
                if self._overdue or time.monotonic() >= deadline:
                    return views
            else:
                views = _rest(views, sent)

    def _wait_writable(self) -> None:
        self.stream.wait_writable(0.1)

    # Reading.

    def receive(self) -> Frame | None:
        """The next frame; None if the stream's receive timeout passed first."""
        while True:
            if self._large is not None:
                if not self._fill_large(self._large):
                    return None
                rows = self._large.header[3]
                if self._group is not None and not self._carried_is_here(self._large.head, rows):
                    return None
                large, self._large = self._large, None
                frame = self._finish_large(large)
                if frame is not None:
                    return frame
                continue
            have = self._end - self._start
            need = HEADER_SIZE
            if have >= HEADER_SIZE:
                header = HEADER.unpack_from(self._window, self._start)
                kind, _, note_length, rows, freed, meta_length, total, _, _, _ = header
                known = ROW * rows + SLOT * freed + note_length + meta_length
                if not (known <= total <= self._unsuspicious and kind in KINDS):
                    check_header(kind, rows, freed, note_length, meta_length, total, self._limits)
                if total > SMALL_FRAME:
                    self._start += HEADER_SIZE
                    head = bytearray(ROW * rows + SLOT * freed + note_length + meta_length)
                    self._large = _Incoming(header, head, deque([memoryview(head)]))
                    continue
                need = HEADER_SIZE + total
                if have >= need:
                    if self._group is not None and rows:
                        table = self._window[self._start + HEADER_SIZE :]
                        if not self._carried_is_here(table, rows):
                            return None
                    frame = self._take_small(header)
                    if frame is not None:
                        return frame
                    continue
            if not self._fill(need):
                return None

    def has_frame(self) -> bool:
        """Whether a whole small frame has been read already."""
        have = self._end - self._start
        if have < HEADER_SIZE or self._arriving is not None:
            return False
        total: int = HEADER.unpack_from(self._window, self._start)[6]
        return have >= HEADER_SIZE + total

    def forget_unread(self) -> None:
        """For the reader, after what cannot be read: nobody is to try it again."""
        self._start = self._end = 0
        self._large = None

    def has_bytes(self) -> bool:
        """Whether there is something to take up without a look at the kernel's buffer."""
        return self._end > self._start or self.is_halfway or self.stream.pending() > 0

    @property
    def is_halfway(self) -> bool:
        """Whether a frame is here and its tensors are still on their way through the group or the
        lane: no byte of the stream tells when they have come."""
        large = self._large
        return self._arriving is not None or (large is not None and bool(large.arrivals))

    def _fill(self, need: int) -> bool:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + need > READ_BUFFER:
            rest = bytes(self._window[self._start : self._end])
            self._window[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = self._read(self._window[self._end :] if self._end else self._window)
        self._end += count
        return count > 0

    def _read(self, target: memoryview) -> int:
        """Bytes read, 0 if the receive timeout passed."""
        if self.broken or self.closed:
            raise LinkBroken("the connection broke")
        try:
            count = self.stream.recv_into(target)
        except OSError as error:
            self.mark_broken()
            raise LinkBroken(f"the connection broke: {error}") from None
        if count == 0:
            self.mark_broken()
            raise LinkBroken("the other end closed the connection")
        if count < 0:
            return 0
        self.received_bytes += count
        return count

    def _take_small(self, header: tuple[int, ...]) -> Frame | None:
        kind, _, note_length, rows, freed, meta_length, total, seq, ack, call_id = header
        window = self._window
        at = self._start + HEADER_SIZE
        end = at + total
        table: tuple[int, ...] = ()
        if rows == 1 and not freed:
            table = ONE_ROW.unpack_from(window, at)
            at += ROW
        elif rows or freed:
            table = struct.unpack_from(f"<{2 * rows + freed}Q", self._window, at)
            at += ROW * rows + SLOT * freed
        carried = _NOTHING if self._arriving is None else self._take_carried(self._arriving)
        if not self._admit(seq, ack, total):
            self._start = end
            return None
        note = bytes(window[at : at + note_length]) if note_length else b""
        at += note_length
        meta = bytes(window[at : at + meta_length])
        at += meta_length
        buffers: list[ByteBuffer] = []
        for row in range(rows):
            size, place = table[2 * row], table[2 * row + 1]
            if place == INLINE:
                if at + size > end:
                    raise CodecError("a frame's buffers are longer than the frame")
                buffers.append(bytearray(window[at : at + size]))
                at += size
            else:
                buffers.append(self._elsewhere(place, size, carried))
        if at != end:
            raise CodecError("a frame is longer than its parts")
        self._start = end
        if freed:
            self._release(table[2 * rows :])
        if kind == Kind.HOUSEKEEPING:
            return None
        return Frame(kind, call_id, note, meta, buffers)

    def _fill_large(self, large: _Incoming) -> bool:
        while True:
            while large.targets:
                target = large.targets[0]
                if large.filled == target.nbytes:
                    large.targets.popleft()
                    large.filled = 0
                elif self._end > self._start:
                    count = min(target.nbytes - large.filled, self._end - self._start)
                    source = self._window[self._start : self._start + count]
                    target[large.filled : large.filled + count] = source
                    self._start += count
                    large.filled += count
                else:
                    count = self._read(target[large.filled :])
                    if count == 0:
                        return False
                    large.filled += count
            if large.opened:
                return not large.arrivals or self._all_arrived(large)
            self._open_large(large)

    def _all_arrived(self, large: _Incoming) -> bool:
        for arrival in large.arrivals:
            if not arrival.wait(CARRIED_TIMEOUT):
                return False
            if arrival.failed:
                raise LinkBroken("the connection broke: its second half did")
        return True

    def _open_large(self, large: _Incoming) -> None:
        """The head is here: allocate the buffers that it announces."""
        rows, total = large.header[3], large.header[6]
        table = struct.unpack_from(f"<{2 * rows}Q", large.head)
        own = [
            (size, inline_bytes(size, place))
            for size, place in zip(table[::2], table[1::2], strict=True)
            if place == INLINE or is_split(place)
        ]
        if len(large.head) + sum(here for _, here in own) != total:
            raise CodecError("a frame's length and the lengths of its parts differ")
        whole = len(large.head) + sum(size for size, _ in own)
        lane = self._lane
        if whole != total:
            if lane is None:
                raise CodecError("a frame refers to a lane that this link does not have")
            if whole > self._limits.frame_bytes:
                raise CodecError(f"a frame of {whole} bytes passes the limit")
        elif self.widen is not None and are_large(size for size, _ in own):
            self._ask_for_lane()
        try:
            large.arrays = [warm.array(size) for size, _ in own]
        except (MemoryError, OSError):
            raise CodecError(f"there is no memory for a frame of {whole} bytes") from None
        for array, (size, here) in zip(large.arrays, own, strict=True):
            target = memoryview(array.data)
            if here:
                large.targets.append(target[:here])
            if here < size and lane is not None:
                large.arrivals.append(lane.receive(target[here:]))
        large.opened = True

    def _finish_large(self, large: _Incoming) -> Frame | None:
        kind, _, note_length, rows, freed, _, total, seq, ack, call_id = large.header
        table = struct.unpack_from(f"<{2 * rows + freed}Q", large.head)
        carried = _NOTHING if self._arriving is None else self._take_carried(self._arriving)
        beside = sum(arrival.target.nbytes for arrival in large.arrivals)
        self.received_bytes += beside
        if not self._admit(seq, ack, total + beside):
            return None
        at = ROW * rows + SLOT * freed
        note = bytes(large.head[at : at + note_length])
        meta = bytes(memoryview(large.head)[at + note_length :])
        arrays = iter(large.arrays)
        buffers: list[ByteBuffer] = []
        for row in range(rows):
            size, place = table[2 * row : 2 * row + 2]
            own = place == INLINE or is_split(place)
            buffers.append(next(arrays) if own else self._elsewhere(place, size, carried))
        if freed:
            self._release(table[2 * rows :])
        if kind == Kind.HOUSEKEEPING:
            return None
        return Frame(kind, call_id, note, meta, buffers)

    def _carried_is_here(self, table: bytearray | memoryview, rows: int) -> bool:
        """Whether the buffers that come through the group have come, before their frame counts as
        arrived. What is under way is kept in the link: another thread may read on."""
        group = self._group
        assert group is not None
        try:
            if self._arriving is None:
                self._arriving = self._expect(group, table, rows)
            return all(arrival.is_here(CARRIED_TIMEOUT) for arrival in self._arriving)
        except MemoryError:
            raise CodecError("there is no memory for the tensors that a frame announces") from None
        except GroupFailed as error:
            self._break_with(group)
            raise LinkBroken(f"a tensor did not arrive: {error}") from None

    def _expect(
        self, group: TensorGroup, table: bytearray | memoryview, rows: int
    ) -> list[Arrival]:
        numbers = struct.unpack_from(f"<{2 * rows}Q", table)
        announced = [
            (size, place - GROUP)
            for size, place in zip(numbers[::2], numbers[1::2], strict=True)
            if place != INLINE and place >= GROUP
        ]
        total = sum(size for size, _ in announced)
        if total > self._limits.frame_bytes:
            raise CodecError("a frame announces more bytes than the limit for a frame")
        arriving = [group.expect(tag, size) for size, tag in announced]
        self.received_bytes += total
        return arriving

    def _take_carried(self, arrived: list[Arrival]) -> Iterator[ByteBuffer]:
        self._arriving = None
        return iter([arrival.array for arrival in arrived])

    def _elsewhere(self, place: int, size: int, carried: Iterator[ByteBuffer]) -> ByteBuffer:
        """A buffer that is not in the frame itself."""
        if place < GROUP:
            return self._shared(place, size)
        buffer = next(carried, None)
        if buffer is None:
            raise CodecError("a frame refers to a process group that this link does not have")
        return buffer

    def _shared(self, offset: int, size: int) -> ByteBuffer:
        if self._view is None:
            raise CodecError("a frame refers to shared memory that this link does not have")
        self.received_bytes += size
        try:
            return self._view.array(offset, size)
        except ArenaError as error:
            raise CodecError(f"a frame refers to shared memory wrongly: {error}") from None

    def _release(self, offsets: tuple[int, ...]) -> None:
        if self._arena is None:
            raise CodecError("a frame gives back shared memory that this link never lent")
        try:
            for offset in offsets:
                self._arena.release(offset)
        except ArenaError as error:
            raise CodecError(f"a frame gives back shared memory wrongly: {error}") from None

    def _admit(self, seq: int, ack: int, size: int) -> bool:
        """Note the acknowledgement; whether the frame is new and to be taken."""
        session = self.session
        try:
            if not session.admit(seq, ack, size):
                return False
        except SessionError as error:
            raise CodecError(str(error)) from None
        if size >= LIGHT or not seq % LOOK_EVERY:
            frames, bytes_ = session.owes_ack()
            if frames >= ACK_FRAMES or bytes_ >= ACK_BYTES:
                self._acknowledge()
        return True

    # Breaking, resuming, closing.

    def mark_broken(self) -> None:
        """Give the stream up. Blocked readers and writers come back at once."""
        with self._lock:
            if self.broken:
                return
            self.broken = True
            group = self._group
            # Before anybody is let go, who may change a tensor then: no more of it may leave.
            self.stream.close()
            if self._lane is not None:
                self._lane.close()
            self._changed.notify_all()
        if group is not None:
            group.close()

    def resume(
        self,
        stream: Stream,
        peer_has_seen: int,
        group: TensorGroup | None = None,
        name: str = "",
    ) -> None:
        """Go on over a new stream: what the peer has not seen is put on the queue again, in order.

        To be called by the reader (or when there is none). It is not written here: both ends may
        have much to send again, and before each has a reader they would wait for each other.
        Raises `SessionError` if the session cannot go on: the peer then counts as lost. The stream
        and its group are then the caller's to close.
        """
        with self._lock:
            self._awaiting += 1
            while self._writing:
                self._changed.wait()
            self._awaiting -= 1
            if self.closed:
                raise LinkClosed("the link is closed")
            self.session.resume(peer_has_seen)
            kept = list(self.session.unacknowledged())
            if not all(isinstance(frame, bytes) or frame.unchanged() for frame in kept):
                raise SessionError(
                    "the connection broke while a tensor was on its way, and the tensor has been "
                    "changed in place since: it cannot be sent again as it was"
                )
            self.stream = stream
            self.name = name
            self._group = group
            self._lane = None
            self.broken = False
            self._start = self._end = 0
            self._large = self._arriving = None
            self._queue = []
            for frame in kept:
                self._queue += (frame,) if isinstance(frame, bytes) else frame.parts
            self._queued_bytes = sum(map(_size, self._queue))
        self.nudge()

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._queue.clear()
            self._changed.notify_all()
            lane = self._lane
        self.stream.close()
        if lane is not None:
            lane.close()
        # Its memory goes now, not when a collection finds it; tensors in it keep what they have.
        if self._arena is not None:
            self._arena.close()
        if self._view is not None:
            self._view.close()
        if self._group is not None:
            self._group.close()
        # Bound methods make circles, and what is in one keeps its descriptor until a collection.
        self.while_blocked = self.nudge = _nobody_looks
        self.widen = None


def _nobody_looks() -> None:
    """Who sets `Link.nudge` is told when a frame waits on the queue and no send may come soon."""


def _kept_whole(
    kind: int,
    call_id: int,
    meta: bytes,
    buffers: Sequence[memoryview],
    note: bytes,
    tensors: Sequence[Tensor],
    seq: int,
    ack: int,
) -> _Borrowed:
    """A frame as it would be sent again: with all of its buffers inline."""
    rows = [(buffer.nbytes, INLINE) for buffer in buffers]
    inline = sum(size for size, _ in rows)
    head = head_of(kind, call_id, meta, note, rows, seq, ack, inline)
    return _Borrowed((head, *buffers), tuple((tensor, tensor._version) for tensor in tensors))


def _size(part: Bytes) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _rest(views: list[Bytes], sent: int) -> list[Bytes]:
    """What is left of the views after so many bytes."""
    for index, view in enumerate(views):
        size = _size(view)
        if sent < size:
            rest = views[index:]
            if sent:
                rest[0] = memoryview(view).cast("B")[sent:]
            return rest
        sent -= size
    return []
