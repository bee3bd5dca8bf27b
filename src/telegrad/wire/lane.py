"""A second connection beside a link's own, for the second halves of large tensors.

One TCP connection is served by one core at each end, which copies; two connections with a thread
each move a large tensor about one and a half times as fast (`benchmarks/streams.py`). So the first
large tensor on a connection has a *lane* opened beside it, and from then on a large buffer is cut
in two: the first part stays in its frame, the other travels by the lane meanwhile.

The rules:

1.  *A lane belongs to one connection.* Who opens it proves the job's key and names the connection
    by what both ends said in its handshake (`handshake.py`), so no lane is taken for that of an
    earlier one. When either breaks, both are given up. The session goes on over a new connection,
    and what was not acknowledged is sent again in one piece.
2.  *A frame counts as arrived when all of it has*, wherever it travelled. A frame that is cut
    leaves no trace.
3.  *Bytes have no frames of their own here.* The parts come in the order of the frames that
    announce them: they are put on the lane's queue in the step in which the frame is numbered. What
    comes is read only when a frame has announced it, straight to its place. So a lane holds no
    memory, and nothing on it is ever parsed.
4.  *Nobody uses a lane before the other end has it.* Each end says one byte when it has attached
    the lane to its link, and sends by it when it has heard that of the other.
5.  When `await_sent` returns, the lane refers to no memory of the caller's, unless it broke.

No thread waits for work: writing and reading are given to one when there is something to do, and
to one at a time of each, so the order is kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from telegrad.wire import interrupts
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import GROUP, INLINE, SPLIT
from telegrad.wire.stream import Stream

THRESHOLD = 1 << 22
"""Bytes. Below it the threads that have to be woken take longer than they save. Half of it, which
is in the frame, never fits a small frame: those know no lanes."""
_READY = b"R"

Run = Callable[[Callable[[], object]], None]


def are_large(sizes: Iterable[int]) -> bool:
    """Whether a buffer of one of these sizes is worth a lane."""
    return any(size >= THRESHOLD for size in sizes)


def cut(
    buffers: Sequence[memoryview],
) -> tuple[list[tuple[int, int]], list[memoryview], list[memoryview]]:
    """The rows of a frame's table, what stays in the frame, and what goes by the lane."""
    rows: list[tuple[int, int]] = []
    inline: list[memoryview] = []
    beside: list[memoryview] = []
    for buffer in buffers:
        size = buffer.nbytes
        if size < THRESHOLD:
            rows.append((size, INLINE))
            inline.append(buffer)
        else:
            data, here = buffer.cast("B"), size // 2
            rows.append((size, SPLIT + here))
            inline.append(data[:here])
            beside.append(data[here:])
    return rows, inline, beside


def is_split(place: int) -> bool:
    """Whether a row of a frame's table speaks of a buffer that comes in two parts."""
    return SPLIT <= place < GROUP


def inline_bytes(size: int, place: int) -> int:
    """How many bytes of a buffer are in the frame itself."""
    if place == INLINE:
        return size
    if not is_split(place):
        return 0
    if place - SPLIT > size:
        raise CodecError("a frame announces more of a buffer than the buffer has")
    return place - SPLIT


class LanePart:
    """A part that is to come by a lane, into its place."""

    def __init__(self, target: memoryview, then: Callable[[], None] | None = None) -> None:
        self.target = target
        self.then = then
        self.failed = False
        self._ended = threading.Event()

    def end(self, *, failed: bool = False) -> None:
        self.failed = failed
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether it ended in that time: all of it is here, or it has `failed`."""
        return self._ended.wait(seconds)


class Lane:
    """One end of a lane. Any thread may send; one at a time receives."""

    def __init__(self, stream: Stream, run: Run, broke: Callable[[], None]) -> None:
        """`run` gives work to a thread. `broke` gives up the connection that this lane is of."""
        self.is_ready = False
        self._stream = stream
        self._run = run
        self._broke = broke
        self._closed = False
        self._changed = threading.Condition()
        self._to_send: deque[bytes | memoryview] = deque()
        self._sending = False
        self._put = 0
        self._released = 0
        """Of so many parts none refers to memory of the one who sent it."""
        self._overdue = False
        self._to_come: deque[LanePart] = deque()
        self._receiving = False
        stream.set_receive_timeout(None)

    def open(self) -> None:
        """The link has this lane now: tell the other end, and await the same word of it."""
        word = bytearray(1)
        self._expect(LanePart(memoryview(word), partial(self._settle, word)))
        self.put([memoryview(_READY)])
        self.go()

    def _settle(self, word: bytearray) -> None:
        if word != _READY:
            raise ConnectionError("the other end does not know what a lane is")
        self.is_ready = True

    # Sending.

    def put(self, parts: Sequence[memoryview]) -> int:
        """Parts that are to be sent next, when `go` is called; the number to await them by."""
        with self._changed:
            self._to_send.extend(parts)
            self._put += len(parts)
            return self._put

    def go(self) -> None:
        with self._changed:
            if self._sending:
                return
            self._sending = True
        self._run(self._send_all)

    def await_sent(self, number: int, deadline: float) -> None:
        """Until the kernel has all up to this number or, at the deadline, the lane a copy of it."""
        with self._changed:
            while self._released < number and not self._closed:
                left = deadline - time.monotonic()
                self._overdue |= left <= 0 or interrupts.has_put_off()
                self._changed.wait(interrupts.at_a_time(left if left > 0 else math.inf))

    def _send_all(self) -> None:
        number = 0
        while True:
            with self._changed:
                if number:
                    self._to_send.popleft()
                    self._released = max(self._released, number)
                    self._changed.notify_all()
                if not self._to_send or self._closed:
                    self._sending = self._overdue = False
                    return
                part = memoryview(self._to_send[0])
                number = self._put - len(self._to_send) + 1
            try:
                self._send_one(part)
            except OSError:
                self._break()

    def _send_one(self, part: memoryview) -> None:
        while not self._closed:
            sent = self._stream.try_send([part])
            part = part[sent:]
            if not part:
                return
            if not sent:
                self._stream.wait_writable(0.1)
                if self._overdue:
                    part = self._own(part)

    def _own(self, part: memoryview) -> memoryview:
        """Somebody cannot wait any longer: nothing may stay in the memory of callers."""
        part = memoryview(bytes(part))
        with self._changed:
            self._to_send.popleft()
            self._to_send = deque([b"", *map(bytes, self._to_send)])
            self._released = self._put
            self._overdue = False
            self._changed.notify_all()
        return part

    # Receiving.

    def receive(self, target: memoryview) -> LanePart:
        """Have the bytes that come next put there; never wait."""
        arrival = LanePart(target)
        self._expect(arrival)
        return arrival

    def _expect(self, arrival: LanePart) -> None:
        with self._changed:
            if self._closed:
                arrival.end(failed=True)
                return
            self._to_come.append(arrival)
            if self._receiving:
                return
            self._receiving = True
        self._run(self._receive_all)

    def _receive_all(self) -> None:
        while True:
            with self._changed:
                if not self._to_come:
                    self._receiving = False
                    return
                arrival = self._to_come[0]
            try:
                self._fill(arrival.target)
                if arrival.then is not None:
                    arrival.then()
            except OSError:
                self._break()
                return
            with self._changed:
                if self._closed:
                    return
                self._to_come.popleft()
            arrival.end()

    def _fill(self, target: memoryview) -> None:
        while target:
            count = self._stream.recv_into(target)
            if count <= 0:
                raise ConnectionError("the other end closed the lane")
            target = target[count:]

    # Ending.

    def _break(self) -> None:
        broke = self._broke
        self.close()
        broke()

    def unheard(self) -> float:
        return self._stream.unheard()

    def close(self) -> None:
        """Give the lane up; who waits for it comes back. Any thread may, more than once.

        Closed before anybody is let go: who has sent may change a tensor then, and no more of it
        may leave.
        """
        self._stream.close()
        with self._changed:
            self._closed = True
            arrivals, self._to_come = self._to_come, deque()
            self._changed.notify_all()
        # It knows the link, and that the lane: in a circle the descriptor stays until a collection.
        self._broke = _nothing_breaks
        for arrival in arrivals:
            arrival.end(failed=True)


def _nothing_breaks() -> None:
    """The connection has been given up, or will be by who closed its lane."""
