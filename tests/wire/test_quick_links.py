"""The short cuts of links do what `send` and `receive` do without them, or nothing."""

from __future__ import annotations

import errno
import gc
import math
import random
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad.wire import group, lane, quick, receiving, sending
from telegrad.wire.connection import READ_BUFFER, SMALL_FRAME, Connection, Incoming
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import GROUP, INLINE, SPLIT, Frame, FrameLimits, Kind
from telegrad.wire.link import Link, LinkBroken, LinkClosed
from telegrad.wire.receiving import ACK_BYTES, ACK_FRAMES
from telegrad.wire.session import Session
from telegrad.wire.stream import PlainStream
from tests.wire.codec_samples import whole_frame
from tests.wire.test_link import linked_by_memory

pytestmark = pytest.mark.skipif(not quick.BUILT, reason="the short cuts were not compiled")

MESSAGE: tuple[int, int, bytes, bytes, list[memoryview]]
MESSAGE = (Kind.CALL, 7, b"note", b"meta", [memoryview(b"abc")])
HEADER = 52


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = (Link(PlainStream(end)) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def sharing() -> Iterator[tuple[Link, Link]]:
    one, other = linked_by_memory()
    yield one, other
    one.close()
    other.close()


def lent(link: Link) -> int:
    assert link._arena is not None
    return link._arena.use.lent


def depart(
    link: Link, *message: Any, rows: list[int] | None = None, most: int = SMALL_FRAME
) -> Any:
    return quick.depart(link, *(message or MESSAGE), rows, most)


def arrive(link: Link) -> Any:
    return quick.arrive(link, ACK_FRAMES, ACK_BYTES)


def state(link: Link) -> dict[str, Any]:
    """All that the two ends of a session, and the queue, know."""
    fields = {name: getattr(link.session, name) for name in Session.__slots__}
    more = ("_queued_bytes", "_writing", "_ticket", "_tickets_written", "_start", "_end")
    fields |= {name: getattr(link, name) for name in (*more, "sent_bytes")}
    return fields | {
        "freed": [*link.freed],
        "_freed_since": link._freed_since,
        "lent": 0 if link._arena is None else lent(link),
        "_kept": [*link.session._kept],
        "_queue": [*link._queue],
        "_lock": link._lock.locked(),
    }


def show(link: Link, data: bytes, start: int = 0) -> None:
    """Have these bytes in the window, as if they had been read."""
    link._window[start : start + len(data)] = data
    link._start, link._end = start, start + len(data)


def heard(link: Link) -> bytes:
    """What has come to the other end, unread."""
    link.stream.set_receive_timeout(1.0)
    return bytes(link._window[: link.stream.recv_into(link._window)])


def test_what_departs_is_numbered_kept_and_written(ends: tuple[Link, Link]) -> None:
    link, other = ends
    link.session.accept(1, 30)
    link.session.accept(2, 12)
    assert depart(link) is True
    data = whole_frame(*MESSAGE, seq=1, ack=2)
    assert heard(other) == data
    assert list(link.session._kept) == [(1, data, len(data) - HEADER)]
    assert link.session.owes_ack() == (0, 0)
    assert link.session.kept_bytes == len(data) - HEADER
    assert (link._writing, link._ticket, link._tickets_written) == (False, 1, 1)
    assert link.sent_bytes == len(data)
    assert not link._lock.locked()
    link._writing = True
    before = state(link)
    assert depart(link) is None, "somebody writes"
    assert state(link) == before


class Wrapped:
    """A stream that does all that another does, and counts what it is asked to do."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.stream, name)


class Special(PlainStream):
    """Another class, whatever it does."""


def wrap(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    link.stream = Wrapped(link.stream)  # type: ignore[assignment]


def make_special(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    link.stream.__class__ = Special


def patch_object(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("try_send", "recv_into", "try_recv_into"):
        monkeypatch.setattr(link.stream, name, getattr(link.stream, name).__call__)


def patch_class(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("try_send", "recv_into", "try_recv_into"):
        written = getattr(PlainStream, name)
        monkeypatch.setattr(PlainStream, name, lambda *args, written=written: written(*args))


OTHERS: list[Callable[[Link, pytest.MonkeyPatch], None]]
OTHERS = [wrap, make_special, patch_object, patch_class]


@pytest.mark.parametrize("change", OTHERS)
def test_only_plain_streams_are_written_to_and_read_quickly(
    ends: tuple[Link, Link], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = ends
    change(link, monkeypatch)
    data = whole_frame(*MESSAGE, seq=1, ack=0)
    turn, sent = depart(link)
    assert (turn, sent) == (([data], len(data), 1), None)
    assert link._writing
    link._write_queue(turn, 1.0, sent)
    assert not link._writing
    assert heard(other) == data
    other.send(*MESSAGE[:2])
    assert arrive(link) is None
    frame = link.receive()
    assert frame is not None
    assert frame.call_id == MESSAGE[1]
    assert link.take_up() is None


def test_what_does_not_fit_is_written_by_who_may_wait(ends: tuple[Link, Link]) -> None:
    link, other = ends
    size = 30_000
    sent = 0
    while (left := depart(link, 1, sent, b"", bytes(size), [])) is True:
        sent += 1
    turn, written = left
    assert 0 <= written < turn[1]
    assert link._writing
    assert depart(link) is None
    writer = threading.Thread(target=link._write_queue, args=(turn, float("inf"), written))
    writer.start()
    came = [other.receive() for _ in range(sent + 1)]
    writer.join()
    assert [frame and frame.call_id for frame in came] == [*range(sent + 1)]
    assert depart(link) is True


def test_a_stream_that_has_ended_breaks_the_link_of_its_writer(ends: tuple[Link, Link]) -> None:
    link, other = ends
    other.close()
    turn, sent = depart(link)
    assert sent == -1
    assert link.stream.loss is not None
    assert link.stream.loss.errno == errno.EPIPE
    link._write_queue(turn, 1.0, sent)
    assert link.broken
    assert not link._writing
    assert link.session.kept_frames == 1


def test_who_waits_for_the_writer_is_told_the_long_way(ends: tuple[Link, Link]) -> None:
    link, other = ends
    size = len(whole_frame(*MESSAGE, seq=1, ack=0))
    link._awaiting = 1
    turn, sent = depart(link)
    assert (sent, turn[1:]) == (size, (size, 1))
    assert (link._writing, link._tickets_written) == (True, 0)
    link._awaiting = 0
    link._write_queue(turn, 1.0, sent)
    assert (link._writing, link._tickets_written) == (False, 1)

    class Comes:
        """Somebody sends just before the bytes are written."""

        def __bool__(self) -> bool:
            link.send(Kind.POST, 2)
            return True

    link.stream.crowd = Comes()  # type: ignore[assignment]
    turn, sent = depart(link)
    link.stream.crowd = ()
    assert (sent, turn[2], link._ticket) == (size, 2, 3)
    link._write_queue(turn, 1.0, sent)
    assert not link._queue
    assert [other.receive() is not None for _ in range(3)] == [True] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"closed": True},
        {"broken": True},
        {"_queue": [b"before"]},
        {"_lock": "held"},
        {"_lock": None},
        {"stream": None},
        {"_tickets_written": None},
    ],
)
def test_what_is_not_alone_or_not_whole_departs_the_long_way(
    ends: tuple[Link, Link], change: dict[str, Any]
) -> None:
    link, _ = ends
    original = {name: getattr(link, name) for name in change}
    for name, value in change.items():
        if value == "held":
            value = threading.Lock()
            value.acquire()
        if value is None:
            delattr(link, name)
        else:
            setattr(link, name, value)
    sent = link.session._sent
    assert depart(link) is None
    assert (link.session._sent, link.session.kept_frames, link._ticket) == (sent, 0, 0)
    for name, value in original.items():
        setattr(link, name, value)


FRAMES: list[tuple[int, int, Any, Any, list[bytes]]] = [
    (Kind.CALL, 1, b"", b"", []),
    (Kind.REPLY, (1 << 64) - 1, b"note", b"meta", [b"x"]),
    (Kind.POST, 7, b"", b"m" * 300, [b"x" * 100, b"", b"y" * 7, b"z"]),
    (Kind.HOUSEKEEPING, 0, bytearray(b"note"), memoryview(b"meta"), [b"abc"]),
]


@pytest.mark.parametrize("fields", FRAMES)
def test_a_frame_is_written_as_the_long_way_writes_it(
    ends: tuple[Link, Link], fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = ends
    message = (*fields[:4], [*map(memoryview, fields[4])])
    assert depart(link, *message) is True
    assert heard(other) == whole_frame(*message, seq=1, ack=0)
    the_long_way(monkeypatch)
    link.send(*fields[:2], fields[3], message[4], note=fields[2])
    assert heard(other) == whole_frame(*message, seq=2, ack=0)


def test_what_lies_in_shared_memory_is_only_named(sharing: tuple[Link, Link]) -> None:
    link, other = sharing
    assert link._arena is not None
    large = memoryview(bytes(range(256)) * 300)
    place = link._arena.place(large)
    rows = [3, INLINE, large.nbytes, place, 2, INLINE]
    inline = [memoryview(b"abc"), memoryview(b"de")]
    assert depart(link, *MESSAGE[:4], inline, rows=rows) is True
    frame = arrive(other)
    assert frame[:4] == MESSAGE[:4]
    assert [*map(bytes, frame.buffers)] == [b"abc", bytes(large), b"de"]
    assert lent(link) >= large.nbytes
    frame.buffers[1][0] = 7  # It is the receiver's.

    del frame
    other._freed_since = 0.0
    assert [*other.freed] == [place]
    assert depart(other) is True
    assert not other.freed
    assert other._freed_since == math.inf
    assert arrive(link) == Frame(*MESSAGE[:4], [bytearray(b"abc")])
    assert lent(link) == 0


def test_only_so_many_slots_go_along_at_once(sharing: tuple[Link, Link]) -> None:
    link, _ = sharing
    link.freed.extend(range(600))
    link._freed_since = 0.0
    assert depart(link) is True
    assert [*link.freed] == [*range(sending.MAX_FREED_PER_FRAME, 600)]
    assert link._freed_since == 0.0


def test_slots_wait_on_if_their_frame_does_not_leave(sharing: tuple[Link, Link]) -> None:
    link, _ = sharing
    link.freed.extend((5, 3, 4))
    before = state(link)
    assert depart(link, most=27) is None
    with pytest.raises(OverflowError):
        depart(link, 256, 1, b"", b"", [])
    assert state(link) == before


@pytest.mark.parametrize("size", [1 << 40, 0])
def test_memory_that_is_not_shared_is_refused(sharing: tuple[Link, Link], size: int) -> None:
    link, other = sharing
    assert depart(link, *MESSAGE[:4], [], rows=[size, 0]) is True
    with pytest.raises(CodecError, match="refers to shared memory wrongly"):
        other.receive()


@pytest.mark.parametrize("place", [SPLIT, SPLIT + 8, GROUP])
def test_what_is_neither_inline_nor_shared_is_left_to_those_who_know_it(
    sharing: tuple[Link, Link], place: int
) -> None:
    link, other = sharing
    assert depart(link, *MESSAGE[:4], [], rows=[8, place]) is True
    assert arrive(other) is None
    assert other.session.seen == 0


def test_memory_is_shared_once_though_reading_its_frame_fails(
    sharing: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array that was made dies, its slot is given back, and may hold something else by now."""
    link, other = sharing
    shared = Link._shared

    def fail_at_second(self: Link, offset: int, size: int) -> Any:
        if offset:
            raise InterruptedError
        return shared(self, offset, size)

    large = [memoryview(bytes([number]) * 70_000) for number in (7, 8)]
    link.send(Kind.CALL, 1, b"", large)
    monkeypatch.setattr(Link, "_shared", fail_at_second)
    with pytest.raises(InterruptedError):
        other.receive()
    monkeypatch.undo()
    link.send(Kind.CALL, 2)
    frame = other.receive()
    assert frame is not None
    assert frame.call_id == 2


def test_slots_that_were_not_lent_are_refused(sharing: tuple[Link, Link]) -> None:
    link, other = sharing
    link.freed.append(4096)
    assert depart(link) is True
    with pytest.raises(CodecError, match="gives back shared memory wrongly"):
        other.receive()


def test_who_shares_no_memory_refuses_what_is_said_to_lie_there(ends: tuple[Link, Link]) -> None:
    link, other = ends
    for number, change in enumerate(({"rows": [8, 0]}, {})):
        if number:
            link.freed.append(0)
        assert depart(link, *MESSAGE[:4], [], **change) is True
        with pytest.raises(CodecError, match="shared memory that this link"):
            other.receive()


def test_what_is_too_long_departs_the_long_way(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    before = state(link)
    size = len(whole_frame(*MESSAGE, seq=1, ack=0)) - HEADER
    assert depart(link, *MESSAGE, most=size) is None
    assert depart(link, 1, 1, b"", b"", [memoryview(b"x")] * 5) is None
    assert state(link) == before
    assert depart(link, *MESSAGE, most=size + 1) is True


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ((Kind.CALL, -1, b"", b"", []), OverflowError),
        ((Kind.CALL, 1 << 64, b"", b"", []), OverflowError),
        ((256, 1, b"", b"", []), OverflowError),
        ((Kind.CALL, 1, "text", b"", []), TypeError),
        ((Kind.CALL, 1, b"", b"", [memoryview(b"abcdef")[::2]]), BufferError),
        ((Kind.CALL, 1, b"", b"", 3), TypeError),
    ],
)
def test_what_cannot_be_written_is_given_no_number(
    ends: tuple[Link, Link], message: Any, error: type[Exception]
) -> None:
    link, _ = ends
    before = state(link)
    with pytest.raises(error):
        depart(link, *message)
    assert state(link) == before
    with pytest.raises(TypeError, match="not a link"):
        quick.depart(link.stream, *MESSAGE, None, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a link"):
        quick.arrive(None, 1, 1)  # type: ignore[arg-type]


def test_no_small_frame_goes_beside_the_stream() -> None:
    """What departs quickly is not asked for its group or its lane."""
    assert min(group.THRESHOLD, lane.THRESHOLD) >= SMALL_FRAME


def test_what_has_arrived_is_taken_and_counts_as_seen(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    for number in (1, 2, 3):
        seq, _ = link.session.stamp()
        link.session.keep(seq, b"kept", 10 * number)
    data = whole_frame(*MESSAGE, seq=1, ack=2)
    show(link, data + data[:7], start=5)
    frame = arrive(link)
    assert frame == Frame(*MESSAGE[:4], [bytearray(b"abc")])
    assert type(frame) is Frame
    assert type(frame.buffers[0]) is bytearray
    assert (link.session.seen, link.session.owes_ack()) == (1, (1, len(data) - HEADER))
    assert (link.session.kept_frames, link.session.kept_bytes) == (1, 30)
    assert (link._start, link._end) == (5 + len(data), 5 + len(data) + 7)
    assert arrive(link) is None, "it is not whole"


def changed(place: int, value: int, size: int) -> bytes:
    data = bytearray(whole_frame(*MESSAGE, seq=1, ack=0))
    data[place : place + size] = value.to_bytes(size, "little")
    return bytes(data)


UNUSUAL = {
    "a kind that there is not": changed(0, 0, 1),
    "a kind beyond the last": changed(0, 7, 1),
    "housekeeping": changed(0, Kind.HOUSEKEEPING, 1),
    "it gives slots back": changed(12, 1, 4),
    "its buffer is in the arena": changed(60, 0, 8),
    "no row for its buffer": changed(8, 0, 4),
    "a row that is not there": changed(8, 2, 4),
    "many rows that are not there": changed(8, 1 << 28, 4),
    "as many as there can be": changed(8, (1 << 32) - 1, 4),
    "a buffer that is too short": changed(52, 2, 8),
    "a buffer that is too long": changed(52, 4, 8),
    "a huge buffer": changed(52, 1 << 62, 8),
    "the longest buffer": changed(52, INLINE, 8),
    "a note that does not fit": changed(4, 5, 4),
    "the longest note": changed(4, (1 << 32) - 1, 4),
    "a meta that does not fit": changed(16, 5, 4),
    "the longest meta": changed(16, (1 << 32) - 1, 4),
    "more bytes than are here": changed(20, 60, 8),
    "as many bytes as can be": changed(20, (1 << 64) - 1, 8),
    "a number that was seen": changed(28, 0, 8),
    "a number that skips one": changed(28, 2, 8),
    "the last number": changed(28, (1 << 64) - 1, 8),
    "an acknowledgement of what was not sent": changed(36, 1, 8),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_not_usual_is_left_to_those_who_know_it(ends: tuple[Link, Link], what: str) -> None:
    link, _ = ends
    show(link, UNUSUAL[what])
    before = state(link)
    assert arrive(link) is None
    assert state(link) == before


def test_every_part_of_a_frame_is_left_to_those_who_read_on(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    data = whole_frame(*MESSAGE, seq=1, ack=0)
    for end in range(1, len(data)):
        show(link, data[:end])
        assert arrive(link) is None
    show(link, data)
    link._start, link._end = 5, 3
    assert arrive(link) is None
    link._start, link._end = -1, len(data)
    assert arrive(link) is None
    link._start, link._end = READ_BUFFER - 8, READ_BUFFER + 99
    assert arrive(link) is None
    show(link, data)
    link._large = Incoming((), bytearray(), receiving.deque())
    assert arrive(link) is None
    link._large = None
    assert arrive(link) is not None


def test_a_frame_beyond_the_limits_of_a_link_is_left_to_those_who_say_so() -> None:
    near, far = socket.socketpair()
    link = Link(PlainStream(near), limits=FrameLimits(frame_bytes=20))
    show(link, whole_frame(*MESSAGE, seq=1, ack=0))
    assert arrive(link) is None
    with pytest.raises(CodecError, match="passes the limit"):
        link.take_up()
    link.close()
    far.close()


def test_who_owes_an_acknowledgement_goes_the_long_way(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    data = whole_frame(*MESSAGE, seq=1, ack=0)
    show(link, data)
    assert quick.arrive(link, 1, ACK_BYTES) is None
    assert quick.arrive(link, ACK_FRAMES, len(data) - HEADER) is None
    assert quick.arrive(link, 2, len(data) - HEADER + 1) is not None


def test_what_has_not_been_read_is_read(ends: tuple[Link, Link]) -> None:
    link, other = ends
    other.send(*MESSAGE[:2], MESSAGE[3], MESSAGE[4], MESSAGE[2])
    other.send(Kind.POST, 8)
    show(link, b"old", start=9)
    link._start = link._end
    assert arrive(link) == Frame(*MESSAGE[:4], [bytearray(b"abc")])
    assert link.received_bytes == other.sent_bytes == link._end
    frame = link.take_up()
    assert frame is not None
    assert frame.call_id == 8
    assert link._start == link._end
    link.stream.set_receive_timeout(0.001)
    assert arrive(link) is False
    assert link.receive() is None
    link.stream.set_receive_timeout(None)
    assert link.take_up() is None


def test_a_part_that_was_read_is_completed(ends: tuple[Link, Link]) -> None:
    link, other = ends
    data = whole_frame(*MESSAGE, seq=1, ack=0)
    other.stream.try_send([data[:60]])
    assert arrive(link) is None
    assert (link._start, link._end, link.received_bytes) == (0, 60, 60)
    other.stream.try_send([data[60:]])
    frame = link.receive()
    assert frame is not None
    assert frame.call_id == 7


def test_the_end_of_a_stream_is_found_by_its_reader(ends: tuple[Link, Link]) -> None:
    link, other = ends
    other.close()
    assert arrive(link) is None
    with pytest.raises(LinkBroken, match="other end closed"):
        link.receive()
    assert arrive(link) is None, "it is broken"


def test_why_a_stream_has_ended_is_known() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    link = Link(PlainStream(near))
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with pytest.raises(LinkBroken):
        link.receive()
    assert isinstance(link.stream.loss, ConnectionResetError)
    link.close()
    listener.close()


class Watcher:
    """In the place of a lookout."""

    def __init__(self, sees: bool) -> None:
        self.sees = sees
        self.told: list[Any] = []

    def wait(self, awaited: int) -> bool:
        self.told.append(awaited)
        return self.sees

    def ended(self, came: bool) -> None:
        self.told.append(came)


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("crowd", [(), (1,)])
@pytest.mark.parametrize("comes", [True, False])
def test_the_lookout_is_told_the_same(
    ends: tuple[Link, Link], sees: bool, crowd: Any, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = ends
    link.stream.set_receive_timeout(0.001)
    link.stream.crowd, link.stream.awaited = crowd, 5
    told = []
    for _ in range(2):
        watcher = link.stream._lookout = Watcher(sees)  # type: ignore[attr-defined]
        link.stream.about_to_sleep = lambda told=watcher.told: told.append("sleeps")
        if comes:
            other.send(Kind.POST, 1)
        assert (link.receive() is not None) == comes
        told.append(watcher.told)
        the_long_way(monkeypatch)
    assert told[0] == told[1]


def test_a_signal_costs_a_reader_nothing(ends: tuple[Link, Link]) -> None:
    link, other = ends
    link.stream.crowd = (1,)  # It sleeps at once.
    seen: list[int] = []

    def handle(number: int, _: Any) -> None:
        seen.append(number)
        if len(seen) == 2:
            raise KeyboardInterrupt
        if len(seen) == 3:
            other.send(Kind.POST, 6)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            link.receive()
        frame = link.receive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert frame is not None
    assert frame.call_id == 6
    assert len(seen) >= 3


def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "depart", lambda *_: None)
    monkeypatch.setattr(receiving, "arrive", lambda *_: None)


def talk(seed: int) -> list[Any]:
    """What two ends know, and hear, after each of many messages of all sizes."""
    choose = random.Random(seed)
    links = linked_by_memory(1 << 24)
    for link in links:
        link.stream.set_receive_timeout(0.001)
    told: list[Any] = []
    held: list[Any] = []
    for _ in range(600):
        link = choose.choice(links)
        if choose.random() < 0.55:
            lengths = (0, 1, 40, 3000, 65_536, 70_000)
            sizes = [choose.choice(lengths) for _ in range(choose.choice((0, 0, 1, 2, 6)))]
            link.send(
                choose.choice((Kind.CALL, Kind.REPLY, Kind.POST, Kind.HOUSEKEEPING)),
                choose.randrange(1 << 64),
                choose.randbytes(choose.choice((0, 9, 70_000)) if choose.random() < 0.1 else 5),
                [memoryview(choose.randbytes(size)) for size in sizes],
                note=choose.randbytes(choose.choice((0, 24))),
                later=choose.random() < 0.2,
            )
        else:
            frame = link.receive()
            told.append(frame and frame._replace(buffers=[*map(bytes, frame.buffers)]))
            held.append(frame)
            del frame
            if len(held) > 5:
                held.pop(choose.randrange(5))
        told.append([state(each) for each in links])
    for link in links:
        link.close()
        with pytest.raises(LinkClosed):
            link.send(Kind.CALL, 1)
    return told


@pytest.mark.parametrize("seed", range(6))
def test_links_that_go_the_long_way_know_and_say_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly = talk(seed)
    the_long_way(monkeypatch)
    assert quickly == talk(seed)


def test_threads_that_send_at_once_lose_nothing(ends: tuple[Link, Link]) -> None:
    link, other = ends
    each, threads = 300, 4

    def send(first: int) -> None:
        for number in range(each):
            link.send(Kind.POST, first + number, b"meta", [memoryview(b"abc")])

    started = [threading.Thread(target=send, args=(k * each,)) for k in range(threads)]
    for thread in started:
        thread.start()
    came = []
    for _ in range(each * threads):
        frame = other.receive()
        assert frame is not None
        came.append(frame.call_id)
    for thread in started:
        thread.join()
    for k in range(threads):
        assert [number for number in came if number // each == k] == sorted(
            range(k * each, (k + 1) * each)
        )
    assert other.session.seen == link.session._sent == each * threads


@pytest.mark.parametrize("quickly", [True, False])
def test_threads_that_give_slots_back_at_once_give_each_back_once(
    sharing: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch, quickly: bool
) -> None:
    if not quickly:
        the_long_way(monkeypatch)
    link, other = sharing
    other.stream.set_receive_timeout(10)
    interval = sys.getswitchinterval()
    failures: list[BaseException] = []

    def send(size: int) -> None:
        try:
            for _ in range(3000):
                link.freed.extend((4096, 8192))
                link.send(Kind.POST, 1, bytes(size))
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        for _ in range(12_000):
            if other.receive() is None:
                return  # Some were not sent.

    given: list[int] = []
    monkeypatch.setattr(Link, "_release", lambda _, offsets: given.extend(offsets))
    threads = [threading.Thread(target=send, args=(size,)) for size in (10, 10, 70_000, 70_000)]
    threads.append(threading.Thread(target=read))
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert sorted(given) == [4096] * 12_000 + [8192] * 12_000


def test_no_object_is_kept_or_lost(ends: tuple[Link, Link]) -> None:
    """One too many or too few references to any of them shows after a thousand."""
    link, other = ends
    meta, buffer = b"meta" * 9, memoryview(b"abc" * 9)
    objects = [link, other, link.session, Connection, Session, Frame, meta, buffer, True, None]

    def use(times: int) -> None:
        for _ in range(times):
            for one, two in ((link, other), (other, link)):
                one.send(Kind.CALL, 1, meta, [buffer])
                assert depart(one, *MESSAGE, most=3) is None
                assert two.receive() is not None

    use(10)
    gc.collect()
    before = [sys.getrefcount(each) for each in objects]
    blocks = sys.getallocatedblocks()
    use(1000)
    gc.collect()
    assert [abs(sys.getrefcount(o) - b) < 20 for o, b in zip(objects, before, strict=True)] == [
        True
    ] * len(objects)
    assert abs(sys.getallocatedblocks() - blocks) < 500
