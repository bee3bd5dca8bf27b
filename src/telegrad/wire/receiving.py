"""Reading: bytes become frames.

One thread at a time reads (who, is the business of the layer above). `receive` keeps what it has
read in the link, never on its stack: a receive that times out can be taken up by another thread
without a byte lost.

A small frame is taken from the read buffer in one go. The parts of a large one are read straight to
their places; what comes through a process group or a lane is waited for. A frame counts as seen
when all of it is here, and only then are its shared-memory slots mapped or given back: a frame that
is cut in the middle leaves no trace.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

from telegrad.wire.arena import ArenaError
from telegrad.wire.connection import CARRIED_TIMEOUT, READ_BUFFER, SMALL_FRAME, Incoming, LinkBroken
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import (
    GROUP,
    HEADER,
    HEADER_SIZE,
    INLINE,
    KINDS,
    ONE_ROW,
    ROW,
    SLOT,
    Frame,
    Kind,
    check_header,
)
from telegrad.wire.group import Arrival, GroupFailed, TensorGroup
from telegrad.wire.lane import are_large, inline_bytes, is_split
from telegrad.wire.outbox import Outbox
from telegrad.wire.primitives import ByteBuffer
from telegrad.wire.quick import arrive
from telegrad.wire.session import SessionError
from telegrad.wire.warm import warm

ACK_FRAMES = 256
ACK_BYTES = 1 << 20

_NOTHING: Iterator[ByteBuffer] = iter(())


class Receiving(Outbox):
    """The reading half of a link."""

    def receive(self) -> Frame | None:
        """The next frame; None if the stream's receive timeout passed first."""
        try:
            while True:
                if self._large is None:
                    # As nearly all are; the rest of this is for the others.
                    found = arrive(self, ACK_FRAMES, ACK_BYTES)
                    if found is not None:
                        return found or None
                else:
                    if not self._fill_large(self._large):
                        return None
                    rows = self._large.header[3]
                    if self._group is not None and not self._carried_is_here(
                        self._large.head, rows
                    ):
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
                        check_header(
                            kind, rows, freed, note_length, meta_length, total, self._limits
                        )
                    if total > SMALL_FRAME:
                        self._start += HEADER_SIZE
                        head = bytearray(ROW * rows + SLOT * freed + note_length + meta_length)
                        self._large = Incoming(header, head, deque([memoryview(head)]))
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
                if have:
                    if not self._fill(need):
                        return None
                else:
                    # Before the read: it may fail, and others look at the buffer meanwhile.
                    self._start = self._end = 0
                    self._end = self._read(self._window)
                    if not self._end:
                        return None
        except MemoryError:
            # A part of it may be gone from the stream: nobody could read on.
            raise CodecError("there is no memory for a frame") from None
        except SessionError as error:
            raise CodecError(str(error)) from None

    def take_up(self) -> Frame | None:
        """As `receive`, but of what is here: None if that is no whole frame."""
        try:
            self._patience = 0.0
            return self.receive()
        finally:
            self._patience = CARRIED_TIMEOUT

    def has_frame(self) -> bool:
        """Whether a whole small frame has been read already, and nothing of it is waited for."""
        if self._end == self._start:
            return False
        have = self._end - self._start
        if have < HEADER_SIZE or self._arriving is not None:
            return False
        total: int = HEADER.unpack_from(self._window, self._start)[6]
        if have < HEADER_SIZE + total:
            return False
        return self._group is None or not self._next_is_carried()

    def has_message(self) -> bool:
        """As `has_frame`, for a frame that is given to someone: who takes up mere housekeeping
        waits for the next."""
        return self.has_frame() and self._window[self._start] != Kind.HOUSEKEEPING

    def _next_is_carried(self) -> bool:
        """Whether a frame has been read of which tensors come through the group. Who takes it up
        waits for them, so nobody who has been served is to wait for that."""
        have = self._end - self._start
        if have < HEADER_SIZE:
            return False
        header = HEADER.unpack_from(self._window, self._start)
        rows, total = header[3], header[6]
        if have < HEADER_SIZE + total or ROW * rows > total:
            return False
        table = struct.unpack_from(f"<{2 * rows}Q", self._window, self._start + HEADER_SIZE)
        return any(place != INLINE and place >= GROUP for place in table[1::2])

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
        if self._arriving is not None or (large is not None and large.arrivals):
            return True
        return self._group is not None and self._next_is_carried()

    def _fill(self, need: int) -> bool:
        """Read more of a frame of which a part is here."""
        if self._start + need > READ_BUFFER:
            rest = bytes(self._window[self._start : self._end])
            self._window[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = self._read(self._window[self._end :])
        self._end += count
        return count > 0

    def _read(self, target: memoryview) -> int:
        """Bytes read, 0 if the receive timeout passed."""
        if self.broken or self.closed:
            raise LinkBroken("the connection broke")
        stream = self.stream
        try:
            count = stream.recv_into(target) if self._patience else stream.try_recv_into(target)
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
        if not self.session.admit(seq, ack, total):
            self._start = end
            return None
        self._acknowledge_if_due()
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

    def _fill_large(self, large: Incoming) -> bool:
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

    def _all_arrived(self, large: Incoming) -> bool:
        for arrival in large.arrivals:
            if not arrival.wait(self._patience):
                return False
            if arrival.failed:
                # The lane says so only after it has let go of who waits for it.
                self.mark_broken()
                raise LinkBroken("the connection broke: its second half did")
        return True

    def _open_large(self, large: Incoming) -> None:
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

    def _finish_large(self, large: Incoming) -> Frame | None:
        kind, _, note_length, rows, freed, _, total, seq, ack, call_id = large.header
        table = struct.unpack_from(f"<{2 * rows + freed}Q", large.head)
        carried = _NOTHING if self._arriving is None else self._take_carried(self._arriving)
        beside = sum(arrival.target.nbytes for arrival in large.arrivals)
        self.received_bytes += beside
        if not self.session.admit(seq, ack, total + beside):
            return None
        self._acknowledge_if_due()
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
            return all(arrival.is_here(self._patience) for arrival in self._arriving)
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

    def _acknowledge_if_due(self) -> None:
        frames, bytes_ = self.session.owes_ack()
        if frames >= ACK_FRAMES or bytes_ >= ACK_BYTES:
            self._acknowledge()
