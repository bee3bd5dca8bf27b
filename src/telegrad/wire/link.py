"""One session between two processes, carried by one byte stream at a time.

Any thread may send (`sending.py`, `outbox.py`), one at a time reads (`receiving.py`). When the
stream breaks, the reader is told (`LinkBroken`); writers are not, because what they sent is kept.
`resume` puts a new stream below the session: each end resends what the other has not seen, and a
frame that was cut in the middle has left no trace.
"""

from __future__ import annotations

import math

from telegrad.wire.connection import LinkBroken, LinkClosed, nobody_looks
from telegrad.wire.frames import Kind
from telegrad.wire.group import TensorGroup
from telegrad.wire.outbox import size_of
from telegrad.wire.receiving import Receiving
from telegrad.wire.sending import Sending
from telegrad.wire.session import SessionError
from telegrad.wire.stream import Stream

__all__ = ["Link", "LinkBroken", "LinkClosed"]

FREED_MAY_WAIT = 0.05
"""Seconds. As a rule a message leaves before that, and takes along what was freed."""


class Link(Sending, Receiving):
    """Sends and receives frames; large tensors go beside them where both ends have a way."""

    def tidy_in(self, now: float) -> float:
        """In how many seconds there is something to tidy, unless a message takes it along.

        What is on the queue is late already; shared memory may wait for a message to ride on.
        """
        if self.has_unwritten:
            return 0.0
        if not self.freed:
            return math.inf
        self._freed_since = min(self._freed_since, now)
        return max(0.0, self._freed_since + FREED_MAY_WAIT - now)

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
            self._start = self._end = 0
            self._large = self._arriving = None
            self._queue = []
            for frame in kept:
                self._queue += (frame,) if isinstance(frame, bytes) else frame.parts
            self._queued_bytes = sum(map(size_of, self._queue))
            # Last: a reader that finds the link whole reads at once.
            self.broken = False
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
        self.while_blocked = self.nudge = nobody_looks
        self.widen = None
