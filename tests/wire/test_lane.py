"""Lanes: large buffers in two parts over two connections, each whole, in order and once."""

from __future__ import annotations

import gc
import random
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from telegrad.wire import lane as lanes
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import HEADER, INLINE, SPLIT, Frame, FrameLimits, Kind
from telegrad.wire.link import Link, LinkBroken, LinkClosed
from telegrad.wire.session import SessionError
from telegrad.wire.stream import Part, PlainStream

SEED = 20261117
THRESHOLD = 1 << 18
NAME = "a connection"


@pytest.fixture(autouse=True)
def smaller_tensors_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "THRESHOLD", THRESHOLD)


def run(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


class Cut(PlainStream):
    """A stream that is cut after so many bytes."""

    left = 1 << 60

    def try_send(self, parts: Any) -> int:
        sent = 0
        for part in parts:
            view = memoryview(part).cast("B")[: self.left]
            count = super().try_send([view]) if view else 0
            sent += count
            self.left -= count
            if not self.left:
                self.close()
                raise ConnectionResetError("cut by the test")
            if count < memoryview(part).nbytes:
                break
        return sent


def pair(kind: type[PlainStream] = PlainStream) -> tuple[PlainStream, PlainStream]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    ends = kind(a), kind(b)
    for end in ends:
        end.set_receive_timeout(0.2)
    return ends


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.001)


def has_lane(link: Link) -> bool:
    return link._lane is not None and link._lane.is_ready


def widen(a: Link, b: Link, ends: tuple[PlainStream, PlainStream] | None = None) -> None:
    ends = pair() if ends is None else ends
    assert a.attach(a.name, ends[0], run)
    assert b.attach(b.name, ends[1], run)
    until(lambda: has_lane(a) and has_lane(b))


def links(**options: Any) -> tuple[Link, Link]:
    ends = pair()
    return Link(ends[0], name=NAME, **options), Link(ends[1], name=NAME, **options)


@pytest.fixture
def wide() -> Iterator[tuple[Link, Link]]:
    a, b = links()
    widen(a, b)
    yield a, b
    a.close()
    b.close()


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def receive(link: Link) -> Frame:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        frame = link.receive()
        if frame is not None:
            return frame
    raise AssertionError("no frame came")


def reconnect(a: Link, b: Link, ends: tuple[PlainStream, PlainStream] | None = None) -> None:
    a.mark_broken()
    b.mark_broken()
    seen_by_a, seen_by_b = a.session.seen, b.session.seen
    ends = pair() if ends is None else ends
    a.resume(ends[0], seen_by_b, name=NAME)
    b.resume(ends[1], seen_by_a, name=NAME)
    for link in (a, b):
        run(link.flush)


def numbered(size: int, number: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.int64) * (number + 7)).to(torch.uint8)


Wide = tuple[Link, Link]


@pytest.mark.parametrize(
    "sizes",
    [
        [THRESHOLD - 1],
        [THRESHOLD],
        [THRESHOLD + 1],
        [3, 5 * THRESHOLD + 3, 0, THRESHOLD // 2, THRESHOLD, 17],
    ],
)
def test_buffers_arrive_as_they_were(wide: Wide, sizes: list[int]) -> None:
    tensors = [numbered(size, number) for number, size in enumerate(sizes)]
    for a, b in (wide, wide[::-1]):
        run(lambda a=a: a.send(Kind.CALL, 1, b"meta", [*map(view, tensors)], b"note"))
        frame = receive(b)
        assert (frame.meta, frame.note, len(frame.buffers)) == (b"meta", b"note", len(sizes))
        for buffer, tensor in zip(frame.buffers, tensors, strict=True):
            assert bytes(memoryview(buffer)) == bytes(view(tensor))  # type: ignore[arg-type]


def test_half_of_a_large_buffer_goes_by_the_lane(wide: Wide) -> None:
    a, b = wide
    lane = a._lane
    assert lane is not None
    sent: list[int] = []
    plain = lane._stream.try_send
    lane._stream.try_send = lambda parts: (sent.append(plain(parts)), sent[-1])[1]  # type: ignore[method-assign]
    x = numbered(3 * THRESHOLD, 1)
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"", [view(x)]))
    sending.start()
    receive(b)
    sending.join(30)
    until(lambda: len(sent) and sum(sent) >= 3 * THRESHOLD // 2)
    assert sum(sent) == 3 * THRESHOLD // 2
    assert a.sent_bytes == b.received_bytes > 3 * THRESHOLD


def test_threads_that_send_at_once_both_ways_get_each_its_own(wide: Wide) -> None:
    numbers = random.Random(SEED)
    choices = [0, 500, THRESHOLD // 2, THRESHOLD, 4 * THRESHOLD]
    sizes = [numbers.choice(choices) for _ in range(60)]

    def send(link: Link, number: int) -> None:
        x = numbered(sizes[number], number)
        link.send(Kind.CALL, number, b"", [view(x)], b"", [x])
        x.fill_(255)

    def take(link: Link) -> list[int]:
        taken = []
        for _ in sizes:
            frame = receive(link)
            expected = numbered(sizes[frame.call_id], frame.call_id).numpy()
            assert (np.frombuffer(frame.buffers[0], np.uint8) == expected).all()  # type: ignore[arg-type]
            taken.append(frame.call_id)
        return sorted(taken)

    with ThreadPoolExecutor(10) as pool:
        taking = [pool.submit(take, link) for link in wide]
        sending = [pool.submit(send, link, n) for n in range(60) for link in wide]
        for each in sending:
            each.result()
        assert all(each.result() == list(range(60)) for each in taking)


# Breaking.


@pytest.mark.parametrize("which", ["stream", "lane"])
def test_connections_cut_at_any_byte_lose_and_double_nothing(which: str) -> None:
    print(f"seed {SEED}")
    numbers = random.Random(SEED)
    a, b = links()
    tensors = [numbered(numbers.choice([2, 3, 5]) * THRESHOLD, number) for number in range(12)]
    taken: list[int] = []

    def take_until_cut() -> None:
        try:
            while len(taken) < len(tensors):
                frame = receive(b)
                expected = tensors[frame.call_id].numpy()
                assert (np.frombuffer(frame.buffers[0], np.uint8) == expected).all()  # type: ignore[arg-type]
                taken.append(frame.call_id)
        except LinkBroken:
            pass

    for number, x in enumerate(tensors):
        stream, lane = pair(Cut), pair(Cut)
        reconnect(a, b, stream)
        widen(a, b, lane)
        unlucky = (stream if which == "stream" else lane)[0]
        assert isinstance(unlucky, Cut)
        unlucky.left = numbers.randrange(1, 2 * THRESHOLD)
        taking = threading.Thread(target=take_until_cut)
        taking.start()
        a.send(Kind.CALL, number, b"", [view(x)], b"", [x])
        a.mark_broken()
        taking.join(30)
        assert b.broken or len(taken) == len(tensors)
    reconnect(a, b)
    take_until_cut()
    assert taken == list(range(len(tensors)))
    assert b.receive() is None


def test_a_lane_that_breaks_takes_its_connection_with_it(wide: Wide) -> None:
    a, b = wide
    lane = b._lane
    assert lane is not None
    x = numbered(8 * THRESHOLD, 1)
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"", [view(x)], b"", [x]))
    sending.start()
    lane._stream.close()
    with pytest.raises(LinkBroken):
        receive(b)
    sending.join(30)
    assert not sending.is_alive()
    reconnect(a, b)
    assert (a._lane, b._lane) == (None, None), "and what is sent again comes in one piece"
    assert bytes(memoryview(receive(b).buffers[0])) == bytes(view(x))  # type: ignore[arg-type]


def test_a_reader_comes_back_while_the_lane_is_slow_and_goes_on_later() -> None:
    near, far = pair()
    link = Link(far, name=NAME)
    slow, end = pair()
    assert link.attach(NAME, end, run)
    slow.try_send([b"R"])
    until(lambda: has_lane(link))
    half = bytes(range(256)) * 512
    row = struct.pack("<QQ", 2 * len(half), SPLIT + len(half))
    near.try_send([HEADER.pack(Kind.CALL, 0, 0, 1, 0, 0, 16 + len(half), 1, 0, 9) + row, half])
    until(lambda: link.receive() is None and link.is_halfway)
    assert link.has_bytes(), "nobody may go to sleep over the stream alone"
    assert link.session.seen == 0, "what is not here whole has not been seen"
    slow.try_send([half[:1000]])
    assert link.receive() is None
    slow.try_send([half[1000:]])
    assert bytes(memoryview(receive(link).buffers[0])) == half + half  # type: ignore[arg-type]
    assert link.session.seen == 1
    assert not link.is_halfway


def test_a_tensor_that_was_changed_meanwhile_is_not_sent_again_as_something_else(
    wide: Wide,
) -> None:
    a, _ = wide
    x = numbered(64 * THRESHOLD, 1)
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"", [view(x)], b"", [x]))
    sending.start()
    until(lambda: a.session.kept_frames)
    a.mark_broken()
    sending.join(30)
    x.add_(1)
    with pytest.raises(SessionError, match="changed in place"):
        a.resume(pair()[0], 0)


def test_a_bytearray_that_was_changed_meanwhile_is_sent_again_as_it_was(wide: Wide) -> None:
    a, b = wide
    data = bytearray(b"\1") * (64 * THRESHOLD)
    x = numbered(THRESHOLD, 1)
    sending = threading.Thread(
        target=lambda: a.send(Kind.CALL, 1, b"", [view(x), memoryview(data)], b"", [x], untracked=1)
    )
    sending.start()
    until(lambda: a.session.kept_frames)
    a.mark_broken()
    sending.join(30)
    [kept] = a.session.unacknowledged()
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), x.numpy()) for part in kept.parts)  # type: ignore[union-attr]
    data[:] = b"\7" * len(data)
    reconnect(a, b)
    first, second = receive(b).buffers
    assert bytes(memoryview(first)) == bytes(view(x))  # type: ignore[arg-type]
    assert set(np.frombuffer(second, np.uint8)) == {1}  # type: ignore[arg-type]


# Ending.


def test_a_send_returns_at_its_deadline_and_the_frames_arrive_as_they_were(wide: Wide) -> None:
    a, b = wide
    tensors = [numbered(32 * THRESHOLD, number) for number in range(4)]
    expected = [bytes(view(x)) for x in tensors]

    def send(number: int) -> None:
        x = tensors[number]
        a.send(Kind.CALL, number, b"", [view(x)], deadline=time.monotonic() + 0.3)
        x.fill_(99)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
    run(a.flush)
    for _ in tensors:
        frame = receive(b)
        assert bytes(memoryview(frame.buffers[0])) == expected[frame.call_id]  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["close", "mark_broken"])
def test_the_end_frees_a_sender_that_waits_for_room(wide: Wide, end: str) -> None:
    a, _ = wide
    x = numbered(64 * THRESHOLD, 1)

    def send() -> None:
        try:
            a.send(Kind.CALL, 1, b"", [view(x)])
        except LinkClosed:
            assert end == "close"

    sending = threading.Thread(target=send)
    sending.start()
    until(lambda: a.session.kept_frames)
    getattr(a, end)()
    sending.join(30)
    assert not sending.is_alive()


# Having one.


@pytest.mark.parametrize("how", ["close", "mend", "lane breaks"])
def test_the_descriptor_of_a_lane_goes_with_it_and_not_when_a_collection_finds_it(how: str) -> None:
    a, b = links()
    ends = pair()
    streams = [weakref.ref(end) for end in ends]
    widen(a, b, ends)
    del ends
    gc.disable()
    try:
        if how == "lane breaks":
            assert a._lane is not None
            a._lane._break()
            assert a.broken
        if how == "mend":
            a.mark_broken()
            b.mark_broken()
            fresh = pair()
            a.resume(fresh[0], 0)
            b.resume(fresh[1], 0)
        else:
            a.close()
            b.close()
            del a, b
        until(lambda: not any(stream() for stream in streams))
    finally:
        gc.enable()


def test_a_lane_is_asked_for_once_by_whoever_sends_or_gets_a_large_tensor() -> None:
    for sender in (0, 1):
        ends = links()
        asked: list[int] = []
        ends[0].widen = lambda asked=asked: asked.append(1)  # type: ignore[misc]
        small, large = numbered(THRESHOLD // 2, 0), numbered(2 * THRESHOLD, 1)
        for tensor in (small, large, large):
            run(lambda t=tensor, s=sender, e=ends: e[s].send(Kind.POST, 0, b"", [view(t)]))  # type: ignore[misc]
            receive(ends[1 - sender])
            assert len(asked) == (tensor is large)


def test_a_lane_is_for_its_own_connection_and_there_is_one() -> None:
    a, b = links()
    assert not a.attach("another", pair()[0], run)
    widen(a, b)
    assert not a.attach(NAME, pair()[0], run)
    a.mark_broken()
    assert not a.attach(NAME, pair()[0], run)
    a.close()
    assert not a.attach(NAME, pair()[0], run)


def test_nothing_is_sent_by_a_lane_that_the_other_end_has_not_attached() -> None:
    a, b = links()
    ends = pair()
    assert a.attach(NAME, ends[0], run)
    x = numbered(2 * THRESHOLD, 1)
    run(lambda: a.send(Kind.CALL, 1, b"", [view(x)]))
    assert bytes(memoryview(receive(b).buffers[0])) == bytes(view(x))  # type: ignore[arg-type]


# What is not ours.


def hostile(*rows: tuple[int, int], inline: int = 100_000, lane: bool = True) -> Link:
    """A link to which somebody who has the key says such a table."""
    near, far = pair()
    link = Link(far, name=NAME, limits=FrameLimits(1 << 30, 1 << 20, 1 << 10))
    if lane:
        other, end = pair()
        assert link.attach(NAME, end, run)
        other.try_send([b"R"])
        until(lambda: has_lane(link))
    table = b"".join(struct.pack("<QQ", *row) for row in rows)
    total = len(table) + inline
    head: Part = HEADER.pack(Kind.CALL, 0, 0, len(rows), 0, 0, total, 1, 0, 1) + table
    near.try_send([head, bytes(inline)])
    return link


BAD = {
    "no lane": (lambda: hostile((200_000, SPLIT + 100_000), lane=False), "does not have"),
    "more than there is": (lambda: hostile((90_000, SPLIT + 100_000)), "more of a buffer"),
    "lengths differ": (lambda: hostile((200_000, SPLIT + 90_000)), "differ"),
    "beyond the limit": (lambda: hostile((1 << 40, SPLIT + 100_000)), "passes the limit"),
    "many within it": (
        lambda: hostile(*[(1 << 28, SPLIT + 10_000)] * 10, inline=100_000),
        "passes the limit",
    ),
    "in a small frame": (lambda: hostile((200, SPLIT + 100), inline=100), "shared memory"),
    "all of it on the lane": (lambda: hostile((99, SPLIT), (9, INLINE), inline=9), "memory"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_table_is_refused_before_anything_is_allocated(name: str) -> None:
    make, match = BAD[name]
    with pytest.raises(CodecError, match=match):
        receive(make())


def test_who_does_not_know_what_a_lane_is_is_not_listened_to() -> None:
    _, far = pair()
    link = Link(far, name=NAME)
    other, end = pair()
    assert link.attach(NAME, end, run)
    other.try_send([b"GET / HTTP/1.1"])
    until(lambda: link.broken)
    assert link._lane is not None
    assert not link._lane.is_ready
