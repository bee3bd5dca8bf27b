"""The queue of a link: frames of many threads leave in order, and a write holds none of them up.

A frame is kept for a possible resend and put on the queue under a short lock; the thread that finds
nobody writing becomes the *writer* and carries the queue to the kernel outside of the lock. So
frames of many threads leave in one call. Who becomes the writer sets `_writing` in the step in
which it takes the queue, and puts it back in the step in which it finds the queue empty.

A frame may refer to the memory of a user's tensor. Its sender stays until its ticket is written, or
until the writer gives up and copies what is left: at a deadline, at an interrupt (`interrupts.py`),
or when the stream breaks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from telegrad.wire import interrupts
from telegrad.wire.connection import SMALL_FRAME, Borrowed, Bytes, Connection, LinkClosed, Turn
from telegrad.wire.frames import HEADER, HEADER_SIZE, Kind

QUEUE_BYTES = 8 << 20
LATER_BYTES = 1 << 14


class Outbox(Connection):
    """The queue, and its writer."""

    def _put(
        self, seq: int, kept: bytes | Borrowed, nbytes: int, parts: Iterable[Bytes], size: int
    ) -> None:
        """Keep a numbered frame, and only then put it on the queue. With the lock held."""
        self.session.keep(seq, kept, nbytes)
        self._queue += parts
        self._queued_bytes += size
        self._ticket += 1

    def _take_turn(self) -> Turn:
        """Become the writer of what is on the queue. With the lock held."""
        self._writing = True
        parts, self._queue = self._queue, []
        size, self._queued_bytes = self._queued_bytes, 0
        self.sent_bytes += size
        return parts, size, self._ticket

    def flush(self, deadline: float = math.inf) -> None:
        """Write what was left on the queue."""
        if self._queue:
            with self._lock:
                if self._writing or self.closed or self.broken:
                    return
                turn = self._take_turn()
            self._write_queue(turn, deadline)

    def drain(self, deadline: float) -> None:
        """Wait until all that was sent is written, by whoever writes, but not beyond that time."""
        self.flush(deadline)
        with self._lock:
            if self._writing:
                self._await_written(self._ticket, deadline)

    @property
    def has_unwritten(self) -> bool:
        return bool(self._queue) and not self._writing and not self.broken

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

    def _await_written(self, ticket: int, deadline: float) -> None:
        self._awaiting += 1
        try:
            while self._tickets_written < ticket and not self.broken:
                if self.closed:
                    raise LinkClosed("the link was closed while a message waited to be written")
                left = deadline - time.monotonic()
                self._overdue |= left <= 0 or interrupts.has_put_off()
                self._changed.wait(interrupts.at_a_time(left if left > 0 else math.inf))
        finally:
            self._awaiting -= 1

    def _write_queue(self, turn: Turn, deadline: float, sent: int | None = None) -> None:
        """Write what was taken from the queue, and then what has come to it, until it is empty.
        `sent`: so many bytes of it were written already, or -1 if that has ended the stream."""
        while True:
            parts, size, ticket = turn
            try:
                if sent is None:
                    sent = self._sent_at_once(parts)
                if sent < 0:
                    self.mark_broken()
                    sent = size
                rest = self._write(_rest(parts, sent), size - sent, deadline) if sent < size else []
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
                turn, sent = self._take_turn(), None

    def _sent_at_once(self, parts: list[Bytes]) -> int:
        """What leaves of a single part, as a rule all; -1 if the stream has ended."""
        if len(parts) != 1:
            return 0
        try:
            return self.stream.try_send(parts)
        except OSError:
            return -1

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
                if self._overdue or time.monotonic() >= deadline or interrupts.has_put_off():
                    return views
            else:
                views = _rest(views, sent)


def size_of(part: Bytes) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _rest(views: list[Bytes], sent: int) -> list[Bytes]:
    """What is left of the views after so many bytes."""
    for index, view in enumerate(views):
        size = size_of(view)
        if sent < size:
            rest = views[index:]
            if sent:
                rest[0] = memoryview(view).cast("B")[sent:]
            return rest
        sent -= size
    return []
