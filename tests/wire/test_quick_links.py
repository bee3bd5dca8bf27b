"""The short cuts of links do what `send` and `receive` do without them, or nothing."""

from __future__ import annotations

import gc
import random
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad.wire import group, lane, quick, receiving, sending
from telegrad.wire.connection import READ_BUFFER, SMALL_FRAME, Connection, Incoming, Turn
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import INLINE, Frame, FrameLimits, Kind, whole
from telegrad.wire.link import Link, LinkClosed
from telegrad.wire.receiving import ACK_BYTES, ACK_FRAMES
from telegrad.wire.session import Session
from telegrad.wire.stream import PlainStream

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


def depart(link: Link, *message: Any, most: int = SMALL_FRAME) -> Turn | None:
    return quick.depart(link, *(message or MESSAGE), most)


def arrive(link: Link) -> Frame | None:
    return quick.arrive(link, ACK_FRAMES, ACK_BYTES)


def state(link: Link) -> dict[str, Any]:
    """All that the two ends of a session, and the queue, know."""
    fields = {name: getattr(link.session, name) for name in Session.__slots__}
    more = ("_queued_bytes", "_writing", "_ticket", "_tickets_written", "_start", "_end")
    fields |= {name: getattr(link, name) for name in (*more, "sent_bytes")}
    return fields | {
        "_kept": [*link.session._kept],
        "_queue": [*link._queue],
        "_lock": link._lock.locked(),
    }


def show(link: Link, data: bytes, start: int = 0) -> None:
    """Have these bytes in the window, as if they had been read."""
    link._window[start : start + len(data)] = data
    link._start, link._end = start, start + len(data)


def test_what_departs_is_numbered_kept_and_to_be_written(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    link.session.accept(1, 30)
    link.session.accept(2, 12)
    turn = depart(link)
    data = whole(*MESSAGE, seq=1, ack=2)
    assert turn == ([data], len(data), 1)
    assert list(link.session._kept) == [(1, data, len(data) - HEADER)]
    assert link.session.owes_ack() == (0, 0)
    assert link.session.kept_bytes == len(data) - HEADER
    assert (link._writing, link._ticket, link.sent_bytes) == (True, 1, len(data))
    assert not link._lock.locked()
    before = state(link)
    assert depart(link) is None, "somebody writes"
    assert state(link) == before
    link._write_queue(turn, 1.0)
    assert depart(link) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"closed": True},
        {"broken": True},
        {"_queue": [b"before"]},
        {"freed": [3]},
        {"_lock": "held"},
        {"_lock": None},
    ],
)
def test_what_is_not_alone_or_not_whole_departs_the_long_way(
    ends: tuple[Link, Link], change: dict[str, Any]
) -> None:
    link, _ = ends
    original = link._lock
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
    link._lock = original


def test_what_is_too_long_departs_the_long_way(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    before = state(link)
    size = len(whole(*MESSAGE, seq=1, ack=0)) - HEADER
    assert depart(link, *MESSAGE, most=size) is None
    assert depart(link, 1, 1, b"", b"", [memoryview(b"x")] * 5) is None
    assert state(link) == before
    assert depart(link, *MESSAGE, most=size + 1) is not None


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
        quick.depart(link.stream, *MESSAGE, 1)  # type: ignore[arg-type]
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
    data = whole(*MESSAGE, seq=1, ack=2)
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
    data = bytearray(whole(*MESSAGE, seq=1, ack=0))
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
    data = whole(*MESSAGE, seq=1, ack=0)
    for end in range(len(data)):
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
    show(link, whole(*MESSAGE, seq=1, ack=0))
    assert arrive(link) is None
    with pytest.raises(CodecError, match="passes the limit"):
        link.take_up()
    link.close()
    far.close()


def test_who_owes_an_acknowledgement_goes_the_long_way(ends: tuple[Link, Link]) -> None:
    link, _ = ends
    data = whole(*MESSAGE, seq=1, ack=0)
    show(link, data)
    assert quick.arrive(link, 1, ACK_BYTES) is None
    assert quick.arrive(link, ACK_FRAMES, len(data) - HEADER) is None
    assert quick.arrive(link, 2, len(data) - HEADER + 1) is not None


def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "depart", lambda *_: None)
    monkeypatch.setattr(receiving, "arrive", lambda *_: None)


def talk(seed: int) -> list[Any]:
    """What two ends know, and hear, after each of many messages of all sizes."""
    choose = random.Random(seed)
    links = [Link(PlainStream(end)) for end in socket.socketpair()]
    for link in links:
        link.stream.set_receive_timeout(0.001)
    told: list[Any] = []
    for _ in range(600):
        link = choose.choice(links)
        if choose.random() < 0.55:
            sizes = [choose.choice((0, 1, 40, 3000)) for _ in range(choose.choice((0, 0, 1, 2, 6)))]
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
