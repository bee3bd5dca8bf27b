"""The memory of a link: what has left, what has arrived, what is still owed.

A connection may break while both workers live. The session outlives it, so that after a reconnect
every frame takes effect exactly once and in order. The rules:

1.  Frames are numbered 1, 2, 3 ... per direction. 0 is the number of no frame: a standalone
    acknowledgement carries it, is not kept, and is never given to `accept`.
2.  Every frame carries the number of the last frame that its sender has accepted. A frame is kept
    until such a number covers it. It is kept *before* its first byte is written, so that no
    acknowledgement can come for a frame that is not there yet.
3.  After a reconnect each end tells the other `seen` inside the handshake. Each resends what comes
    after that and nothing else. A frame that arrives a second time is dropped by its number.
4.  The stream below is ordered. A number that skips one means that an end has lost its memory; no
    repair is possible, and the session ends with an error.

What must never happen: a frame is forgotten that the peer may not have. Hence `resume` refuses a
position outside of what is kept instead of sending what it happens to hold.

Memory is bounded by the peer's acknowledgements. Traffic in both directions acknowledges itself;
for one-sided traffic the driver asks `owes_ack` after each frame and sends a standalone
acknowledgement past its thresholds. `kept_frames` and `kept_bytes` tell the sender when to wait.

Roles. There is no lock in here. One thread at a time writes (the holder of the link's write lock)
and one at a time reads. Each field has one role that assigns it; the other may look at it and
then sees a number that was right a moment ago, which every rule above tolerates.

    write lock   stamp, keep, acknowledge         _sent, _last_kept, _kept_total,
                                                  _reported, _reported_bytes
    read role    admit, accept, acknowledged,     _seen, _seen_bytes, _dropped_total
                 owes_ack
    both         resume, unacknowledged           (no connection is up: both roles are idle)

`_kept` is appended by the writer and popped from the left by the reader only. Both operations of a
deque are atomic, and the reader looks at the first element before it pops what nobody else pops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Frame = TypeVar("Frame")


class SessionError(Exception):
    """The two ends of a link disagree about what has been sent; the link cannot go on."""


class Session(Generic[Frame]):
    """One end of a link's session. `Frame` is whatever the driver wants back to send again."""

    __slots__ = (
        "_dropped_total",
        "_kept",
        "_kept_total",
        "_last_kept",
        "_reported",
        "_reported_bytes",
        "_seen",
        "_seen_bytes",
        "_sent",
    )

    def __init__(self) -> None:
        self._sent = 0
        self._kept: deque[tuple[int, Frame, int]] = deque()
        self._last_kept = 0
        self._kept_total = 0
        self._dropped_total = 0
        self._seen = 0
        self._seen_bytes = 0
        self._reported = 0
        self._reported_bytes = 0

    @property
    def seen(self) -> int:
        """The last frame accepted: the position that a reconnecting peer is told."""
        return self._seen

    @property
    def kept_frames(self) -> int:
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        return self._kept_total - self._dropped_total

    def stamp(self) -> tuple[int, int]:
        """The number of the next frame to leave, and the acknowledgement that it carries."""
        # The bytes are read before the number: a frame accepted in between then counts as owed
        # until the next acknowledgement, never as acknowledged too early.
        self._reported_bytes = self._seen_bytes
        self._reported = ack = self._seen
        self._sent = seq = self._sent + 1
        return seq, ack

    def keep(self, seq: int, frame: Frame, nbytes: int) -> None:
        """Remember a stamped frame. Frames are kept in the order of their numbers, without gaps."""
        if seq != self._last_kept + 1:
            raise SessionError(
                f"frame {seq} is kept out of order: the last one kept is {self._last_kept}. "
                "Stamp and keep every frame, both under one hold of the write lock."
            )
        self._last_kept = seq
        self._kept_total += nbytes
        self._kept.append((seq, frame, nbytes))

    def acknowledge(self) -> int:
        """The acknowledgement for a frame that has no number of its own."""
        self._reported_bytes = self._seen_bytes
        self._reported = ack = self._seen
        return ack

    def accept(self, seq: int, nbytes: int = 0) -> bool:
        """Whether the frame that has arrived is new; a double is to be dropped."""
        seen = self._seen
        if seq == seen + 1:
            self._seen = seq
            self._seen_bytes += nbytes
            return True
        if 0 < seq <= seen:
            return False
        raise SessionError(
            f"frame {seq} arrived after frame {seen}: frames between them are missing. "
            "Close the link; the peer has lost its session or does not speak this protocol."
        )

    def admit(self, seq: int, ack: int, nbytes: int) -> bool:
        """A frame has arrived, with a number or without: `acknowledged`, then `accept`.

        Every frame comes this way, so what is usual is done here and without a call.
        """
        if ack > self._sent:
            self.acknowledged(ack)
        kept = self._kept
        while kept and kept[0][0] <= ack:
            self._dropped_total += kept.popleft()[2]
        if seq == self._seen + 1:
            self._seen = seq
            self._seen_bytes += nbytes
            return True
        return seq != 0 and self.accept(seq, nbytes)

    def acknowledged(self, ack: int) -> None:
        """The peer has everything up to `ack`. An acknowledgement older than the last is no news:
        frames that are sent again carry those of their first departure."""
        if ack > self._sent:
            raise SessionError(
                f"the peer acknowledges frame {ack}, but only {self._sent} were sent. "
                "Close the link; the peer has lost its session or does not speak this protocol."
            )
        kept = self._kept
        while kept and kept[0][0] <= ack:
            self._dropped_total += kept.popleft()[2]

    def owes_ack(self) -> tuple[int, int]:
        """Frames and bytes that the peer keeps for want of an acknowledgement."""
        return self._seen - self._reported, self._seen_bytes - self._reported_bytes

    def resume(self, peer_has_seen: int) -> None:
        """A new connection is up and both ends have told `seen`: forget what the peer has.

        What is left, `unacknowledged`, is to be sent again before anything else.
        """
        whole = self._kept and self._last_kept == self._sent
        oldest = self._kept[0][0] if whole else self._sent + 1
        if not oldest - 1 <= peer_has_seen <= self._sent:
            raise SessionError(
                f"the peer wants to go on after frame {peer_has_seen}, but only positions "
                f"{oldest - 1} to {self._sent} can be resumed. One of the two workers has "
                "restarted: treat the peer as lost."
            )
        self.acknowledged(peer_has_seen)
        self.acknowledge()

    def unacknowledged(self) -> Iterator[Frame]:
        """The kept frames in the order of their numbers, whatever is acknowledged meanwhile."""
        return (frame for _, frame, _ in tuple(self._kept))
