"""What both directions of a link share: the stream, what is beside it, and how they end together.

A stream may have a process group beside it (`group.py`) or a second connection (`lane.py`). What is
beside a stream breaks with it, and the stream with what is beside it.

All that a link knows is kept here; what is done with it stands in `outbox.py`, `sending.py` and
`receiving.py`, and `link.py` puts them together.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from telegrad.wire.arena import Arena, ArenaView
from telegrad.wire.frames import LIMITS, SLOT, FrameLimits
from telegrad.wire.group import Arrival, TensorGroup
from telegrad.wire.lane import Lane, LanePart, Run
from telegrad.wire.session import Session
from telegrad.wire.stream import Stream

READ_BUFFER = 1 << 18
SMALL_FRAME = 1 << 16
CARRIED_TIMEOUT = 0.05
"""Seconds for which a reader waits at a time for tensors that come beside their frame."""

Bytes = bytes | memoryview
Turn = tuple[list[Bytes], int, int]
"""What its writer has to write: the parts, their size, and the last ticket among them."""


class LinkBroken(ConnectionError):
    """The stream ended. The session may go on over another one."""


class LinkClosed(ConnectionError):
    """The link was closed for good."""


@dataclass(slots=True)
class Borrowed:
    """A frame that left with parts in the memory of the user's tensors, for a resend.

    Of each tensor it is known which version it had, and where its memory was: `share_memory_` moves
    it, and what is at the old place then is anybody's.
    """

    parts: tuple[Bytes, ...]
    tensors: tuple[tuple[Tensor, int, int], ...]

    def own(self) -> None:
        """Copy what belongs to the user, who may change it from now on."""
        self.parts, self.tensors = tuple(map(bytes, self.parts)), ()

    def unchanged(self) -> bool:
        return all(t._version == version and place_of(t) == at for t, version, at in self.tensors)


@dataclass(slots=True)
class Incoming:
    """A frame that does not fit the read buffer: each part is filled into its own memory."""

    header: tuple[int, ...]
    head: bytearray
    targets: deque[memoryview]
    filled: int = 0
    opened: bool = False
    arrays: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    arrivals: list[LanePart] = field(default_factory=list)


class Connection:
    """The state of a link, and its breaking."""

    # The compiled short cuts find them without a look into a dictionary.
    __slots__ = (
        "_arena",
        "_arriving",
        "_awaiting",
        "_changed",
        "_end",
        "_freed_since",
        "_group",
        "_lane",
        "_large",
        "_limits",
        "_lock",
        "_overdue",
        "_patience",
        "_queue",
        "_queued_bytes",
        "_start",
        "_ticket",
        "_tickets_written",
        "_unsuspicious",
        "_view",
        "_window",
        "_writing",
        "broken",
        "closed",
        "freed",
        "name",
        "nudge",
        "received_bytes",
        "sent_bytes",
        "session",
        "stream",
        "while_blocked",
        "widen",
    )

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
        self.session: Session[bytes | Borrowed] = Session()
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
        self.nudge: Callable[[], None] = nobody_looks
        self.freed: deque[int] = deque() if freed is None else freed
        self._freed_since = math.inf
        """When something was found there first, since all of it was taken along."""

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
        self._large: Incoming | None = None
        self._arriving: list[Arrival] | None = None
        self._patience = CARRIED_TIMEOUT

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

    def unheard(self) -> float:
        """Seconds for which the other host has not acknowledged what it was sent."""
        lane = self._lane
        return max(self.stream.unheard(), 0.0 if lane is None else lane.unheard())

    def _break_with(self, beside: TensorGroup | Lane) -> None:
        """What is beside a stream failed: if it is this stream, it has to be made anew with it."""
        with self._lock:
            is_present = beside is self._group or beside is self._lane
        if is_present:
            self.mark_broken()

    def attach(self, name: str, stream: Stream, run: Run) -> bool:
        """Have a lane over a second stream. False: the connection that it is for has none to have,
        or is gone."""
        with self._lock:
            if self.closed or self.broken or self._lane is not None or name != self.name:
                return False
            lane = self._lane = Lane(stream, run, lambda: self._break_with(lane))
        lane.open()
        return True

    def _ask_for_lane(self) -> None:
        with self._lock:
            ask, self.widen = self.widen, None
        if ask is not None:
            ask()

    def _wait_writable(self) -> None:
        self.stream.wait_writable(0.1)


def place_of(tensor: Tensor) -> int:
    """Where its elements lie; 0 if they have no memory, or several."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def nobody_looks() -> None:
    """Who sets `Link.nudge` is told when a frame waits on the queue and no send may come soon."""
