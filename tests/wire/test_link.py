"""A link over real sockets: frames whole, in order and once, whatever happens to the stream."""

from __future__ import annotations

import math
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from telegrad.wire import receiving
from telegrad.wire.arena import Arena, ArenaView
from telegrad.wire.codec import Packed, pack, unpack
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import HEADER, HEADER_SIZE, INLINE, Frame, FrameLimits, Kind
from telegrad.wire.link import FREED_MAY_WAIT, Link, LinkBroken, LinkClosed
from telegrad.wire.sending import MAX_FREED_PER_FRAME
from telegrad.wire.session import SessionError
from telegrad.wire.stream import PlainStream

SEED = 20261116
LARGE = 200_000


def streams(kind: str = "unix") -> tuple[PlainStream, PlainStream]:
    if kind == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            a = socket.create_connection(server.getsockname())
            b, _ = server.accept()
    ends = PlainStream(a), PlainStream(b)
    for end in ends:
        end.set_receive_timeout(0.2)
    return ends


def links(kind: str = "unix", **options: Any) -> tuple[Link, Link]:
    a, b = streams(kind)
    return Link(a, **options), Link(b, **options)


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def receive(link: Link) -> Frame:
    """The next frame, in whatever pieces it comes."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        frame = link.receive()
        if frame is not None:
            return frame
    raise AssertionError("no frame came")


def reconnect(a: Link, b: Link, kind: str = "unix") -> None:
    """As two workers do: each tells the other what it has seen, then both go on."""
    a.mark_broken()
    b.mark_broken()
    seen_by_a, seen_by_b = a.session.seen, b.session.seen
    ends = streams(kind)
    a.resume(ends[0], seen_by_b)
    b.resume(ends[1], seen_by_a)
    for link in (a, b):
        threading.Thread(target=link.flush, daemon=True).start()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_frames_arrive_whole_and_in_order(kind: str) -> None:
    a, b = links(kind)
    a.send(Kind.CALL, 1, b"meta", note=b"note")
    a.send(Kind.POST, 0)
    a.send(Kind.REPLY, 7, b"m" * 70_000)
    first, second, third = receive(b), receive(b), receive(b)
    assert (first.kind, first.call_id, first.meta, first.note) == (Kind.CALL, 1, b"meta", b"note")
    assert (second.kind, second.meta, second.buffers) == (Kind.POST, b"", [])
    assert (third.kind, third.call_id, third.meta) == (Kind.REPLY, 7, b"m" * 70_000)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_what_is_here_is_taken_up_and_nothing_is_waited_for(kind: str) -> None:
    a, b = links(kind)
    b.stream.set_receive_timeout(60.0)
    assert b.take_up() is None
    a.send(Kind.HOUSEKEEPING, 0)
    a.send(Kind.POST, 0, b"meta")
    assert receive(b).meta == b"meta"
    a.send(Kind.HOUSEKEEPING, 0)
    until = time.monotonic() + 10
    while b.session.seen < 3 and time.monotonic() < until:
        assert b.take_up() is None
    assert b.session.seen == 3
    a.stream.try_send([HEADER.pack(Kind.POST, 0, 0, 0, 0, 4, 4, 4, 0, 0) + b"me"])
    while b._end - b._start < HEADER_SIZE + 2 and time.monotonic() < until:
        assert b.take_up() is None
    a.stream.try_send([b"ta"])
    assert receive(b).meta == b"meta"
    a.stream.close()
    assert select.select([b.stream], [], [], 10)[0]
    with pytest.raises(LinkBroken):
        b.take_up()


def test_what_is_taken_up_in_passing_says_nothing_of_how_long_waits_take() -> None:
    a, b = links()
    assert isinstance(b.stream, PlainStream)
    b.stream.awaited = 7
    b.stream._lookout._expected[7] = 0.03
    a.send(Kind.POST, 0, b"meta")
    assert b.take_up() is not None
    assert b.stream._lookout._expected == {7: 0.03}


def test_a_note_of_a_message_with_very_many_tensors_arrives() -> None:
    a, b = links()
    note = bytes(range(256)) * 300
    a.send(Kind.CALL, 1, b"meta", note=note)
    a.send(Kind.POST, 0, b"next")
    first, second = receive(b), receive(b)
    assert (first.note, first.meta, second.meta) == (note, b"meta", b"next")


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE, 3_000_000])
def test_buffers_arrive_as_they_were(count: int) -> None:
    a, b = links()
    x = torch.arange(count, dtype=torch.int32)
    y = torch.ones(3, dtype=torch.uint8)
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"m", [view(x), view(y)]))
    sending.start()
    frame = receive(b)
    sending.join()
    assert [bytes(memoryview(each)) for each in frame.buffers] == [  # type: ignore[arg-type]
        x.numpy().tobytes(),
        b"\1\1\1",
    ]


def test_many_threads_send_and_no_frame_is_torn() -> None:
    a, b = links()
    numbers = random.Random(SEED)
    sizes = [numbers.choice([0, 10, 5_000, LARGE]) for _ in range(200)]

    def send(number: int) -> None:
        data = torch.full((sizes[number],), number % 251, dtype=torch.uint8)
        a.send(Kind.CALL, number, b"%d" % number, [view(data)])

    with ThreadPoolExecutor(8) as pool:
        sending = [pool.submit(send, number) for number in range(200)]
        frames = [receive(b) for _ in range(200)]
        for each in sending:
            each.result()
    assert sorted(frame.call_id for frame in frames) == list(range(200))
    for frame in frames:
        buffer = np.frombuffer(frame.buffers[0], np.uint8)  # type: ignore[arg-type]
        assert len(buffer) == sizes[frame.call_id]
        assert (buffer == frame.call_id % 251).all()


def test_what_is_left_for_later_goes_with_the_next_or_with_a_flush() -> None:
    a, b = links()
    a.send(Kind.CALL, 1, later=True)
    assert a.has_unwritten
    assert b.receive() is None
    a.send(Kind.CALL, 2)
    assert [receive(b).call_id, receive(b).call_id] == [1, 2]
    a.send(Kind.CALL, 3, later=True)
    a.flush()
    assert receive(b).call_id == 3
    assert not a.has_unwritten


def test_a_frame_that_comes_in_pieces_survives_timeouts_between_them() -> None:
    near, far = socket.socketpair()
    stream = PlainStream(far)
    stream.set_receive_timeout(0.01)
    link = Link(stream)
    data = HEADER.pack(Kind.CALL, 0, 0, 0, 0, 5, 5, 1, 0, 9) + b"hello"
    for position in range(len(data) - 1):
        near.sendall(data[position : position + 1])
        if position % 10 == 0:
            assert link.receive() is None
    near.sendall(data[-1:])
    assert receive(link).meta == b"hello"


# Shared memory.


def linked_by_memory(size: int = 1 << 22) -> tuple[Link, Link]:
    a, b = streams()
    arenas = Arena(size), Arena(size)
    freed: tuple[deque[int], deque[int]] = (deque(), deque())
    views = (
        ArenaView(arenas[1].fd, freed[0].append),
        ArenaView(arenas[0].fd, freed[1].append),
    )
    return (
        Link(a, arena=arenas[0], view=views[0], freed=freed[0]),
        Link(b, arena=arenas[1], view=views[1], freed=freed[1]),
    )


def test_large_buffers_go_through_memory_and_its_slots_come_back() -> None:
    a, b = linked_by_memory()
    x = torch.arange(1 << 18, dtype=torch.int32)
    for number in range(50):
        x.fill_(number)
        a.send(Kind.CALL, number, buffers=[view(x)])
        frame = receive(b)
        assert (np.frombuffer(frame.buffers[0], np.int32) == number).all()  # type: ignore[arg-type]
        del frame
        b.send(Kind.REPLY, number)
        receive(a)
    assert a.session.kept_bytes < 1 << 20


def test_shared_memory_that_a_link_does_not_have_is_refused() -> None:
    near, far = socket.socketpair()
    link = Link(PlainStream(far))
    row = (64).to_bytes(8, "little") + (0).to_bytes(8, "little")
    near.sendall(HEADER.pack(Kind.CALL, 0, 0, 1, 0, 0, 16, 1, 0, 1) + row)
    with pytest.raises(CodecError, match="shared memory"):
        receive(link)


# Breaking and resuming.


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_frames_cut_at_any_byte_are_sent_again_and_taken_once(kind: str) -> None:
    print(f"seed {SEED}")
    numbers = random.Random(SEED)
    a, b = links(kind)
    x = torch.arange(60_000, dtype=torch.int32)
    taken: list[int] = []
    for number in range(1, 41):
        a.send(Kind.CALL, number, b"m" * numbers.randrange(2000), later=True)
        if number % 8 == 0:
            sending = threading.Thread(
                target=a.send, args=(Kind.CALL, 1000 + number, b"", [view(x)], b"", [x])
            )
            sending.start()
            part = bytearray(numbers.randrange(1, 200_000))
            got = 0
            # Bytes that reach this end and are lost with the connection.
            while got < len(part):
                count = b.stream.recv_into(memoryview(part)[got:])
                if count <= 0:
                    break
                got += count
            reconnect(a, b, kind)
            sending.join()
            while a.session.kept_frames and len(taken) < number + number // 8:
                taken.append(receive(b).call_id)
    a.flush()
    while len(taken) < 45:
        taken.append(receive(b).call_id)
    expected = []
    for number in range(1, 41):
        expected += [number] if number % 8 else [number, 1000 + number]
    assert taken == expected
    assert b.receive() is None


def test_what_was_taken_before_the_break_is_not_taken_again() -> None:
    a, b = links()
    for number in range(10):
        a.send(Kind.CALL, number)
    assert [receive(b).call_id for _ in range(6)] == list(range(6))
    reconnect(a, b)
    assert [receive(b).call_id for _ in range(4)] == [6, 7, 8, 9]
    assert b.receive() is None


def test_both_ends_may_have_more_to_send_again_than_a_connection_holds() -> None:
    a, b = links()
    x = torch.arange(1 << 21, dtype=torch.int32)
    for link in (a, b):
        link.mark_broken()
        for number in range(3):
            link.send(Kind.CALL, number, b"", [view(x)], b"", [x])
    reconnect(a, b)
    with ThreadPoolExecutor(2) as pool:
        taken = pool.map(lambda link: [receive(link).call_id for _ in range(3)], (a, b))
        assert list(taken) == [[0, 1, 2], [0, 1, 2]]


def test_sending_on_a_broken_link_waits_in_the_queue() -> None:
    a, b = links()
    a.mark_broken()
    for number in range(5):
        a.send(Kind.CALL, number)
    reconnect(a, b)
    assert [receive(b).call_id for _ in range(5)] == list(range(5))


def test_a_reader_is_told_of_the_break_and_a_writer_is_not() -> None:
    a, b = links()
    b.stream.close()
    with pytest.raises(LinkBroken):
        receive(a)
    a.send(Kind.CALL, 1)
    assert a.broken


def test_what_was_taken_is_no_frame_while_the_next_is_waited_for_or_after_a_break() -> None:
    a, b = links()
    a.send(Kind.CALL, 1)
    receive(b)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(b.receive)
        time.sleep(0.05)
        assert not b.has_frame()
        assert reading.result(30) is None
    a.send(Kind.CALL, 2)
    receive(b)
    a.stream.close()
    with pytest.raises(LinkBroken):
        receive(b)
    assert not b.has_frame()
    assert not b.has_bytes()


def test_housekeeping_is_a_frame_and_no_message_that_an_answer_could_leave_with() -> None:
    a, b = links()
    a.send(Kind.CALL, 1, later=True)
    a.send(Kind.HOUSEKEEPING, 0, later=True)
    a.send(Kind.CALL, 2, later=True)
    a.send(Kind.CALL, 3)
    receive(b)
    assert b.has_frame()
    assert not b.has_message()
    receive(b)
    assert b.has_message()


@pytest.mark.parametrize("change", [lambda x: x.add_(1), torch.Tensor.share_memory_])
def test_a_tensor_that_was_changed_meanwhile_is_not_sent_again_as_something_else(
    change: Callable[[torch.Tensor], object],
) -> None:
    a, b = links()
    x = torch.zeros(LARGE, dtype=torch.uint8)
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"", [view(x)], b"", [x]))
    sending.start()
    part = bytearray(1000)
    b.stream.recv_into(memoryview(part))
    a.mark_broken()
    sending.join(30)
    change(x)
    with pytest.raises(SessionError, match="changed in place"):
        a.resume(streams()[0], 0)


def test_tensors_of_inference_mode_are_sent_as_they_were_when_they_were_sent() -> None:
    """They have no version counter: nobody could tell later whether they were changed."""
    a, b = links()
    with torch.inference_mode():
        x = torch.arange(LARGE).to(torch.uint8)
    was = x.numpy().tobytes()
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"", [view(x)], b"", [x]))
    sending.start()
    b.stream.recv_into(memoryview(bytearray(1000)))
    a.mark_broken()
    sending.join(30)
    with torch.inference_mode():
        x.add_(1)
    reconnect(a, b)
    a.send(Kind.CALL, 2, b"next")
    [buffer] = receive(b).buffers
    assert bytes(memoryview(buffer)) == was  # type: ignore[arg-type]
    assert receive(b).meta == b"next"


class Holder:
    """Something of the user's that only pickle knows, with an array inside."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array


def seen_read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    seen = array.view()
    seen.flags.writeable = False
    return seen


def send_packed(link: Link, value: object, call_id: int = 1) -> Packed:
    packed = pack(value)
    link.send(
        Kind.CALL,
        call_id,
        packed.meta,
        packed.buffers,
        tensors=packed.tensors,
        untracked=packed.untracked,
    )
    return packed


def receive_packed(link: Link) -> Any:
    frame = receive(link)
    return unpack(frame.meta, frame.buffers)


def borrowed_by(link: Link) -> list[np.ndarray[Any, Any]]:
    """What the frames that are kept for a resend consist of."""
    parts = [part for frame in link.session.unacknowledged() for part in frame.parts]  # type: ignore[union-attr]
    return [np.frombuffer(part, np.uint8) for part in parts]


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, bytearray, Holder, seen_read_only, lambda x: [torch.ones(LARGE), x, bytes(x)]],
    ids=["array", "bytearray", "object", "read-only view", "beside a tensor"],
)
def test_what_has_no_version_counter_is_sent_again_as_it_was_when_it_was_sent(
    wrap: Callable[[np.ndarray[Any, Any]], Any],
) -> None:
    a, b = links()
    array = np.full(LARGE, 1, np.uint8)
    value = wrap(array)
    a.mark_broken()
    send_packed(a, value)
    np.frombuffer(value if type(value) is bytearray else array, np.uint8)[:] = 7
    reconnect(a, b)
    came = receive_packed(b)
    came = came.array if isinstance(came, Holder) else came
    came = came[1] if type(came) is list else came
    assert set(np.frombuffer(came, np.uint8)) == {1}


def test_only_what_has_no_version_counter_and_can_change_is_copied() -> None:
    a, _ = links()
    tensor, array, data = torch.ones(LARGE), np.ones(LARGE), bytes(LARGE)
    gaps = torch.ones(3, LARGE).t()
    a.mark_broken()
    send_packed(a, [array, tensor, gaps, data])
    kept = borrowed_by(a)
    for borrowed in (tensor.numpy(), gaps.numpy(), np.frombuffer(data, np.uint8)):
        assert any(np.shares_memory(part, borrowed) for part in kept)
    assert not any(np.shares_memory(part, array) for part in kept)


def test_a_tensor_that_was_changed_is_noticed_beside_an_array() -> None:
    a, b = links()
    tensor, array = torch.ones(LARGE), np.ones(LARGE)
    a.mark_broken()
    send_packed(a, [tensor, array])
    array[:] = 7
    tensor.add_(1)
    with pytest.raises(SessionError, match="changed in place"):
        a.resume(streams()[0], 0)
    b.close()


def test_of_a_frame_partly_in_shared_memory_the_rest_is_kept_as_it_was() -> None:
    a, b = linked_by_memory(1 << 18)
    in_memory, tensor = np.full(LARGE, 1, np.uint8), torch.ones(LARGE)
    array = np.full(LARGE, 2, np.uint8)
    a.mark_broken()
    send_packed(a, [tensor, in_memory, array])
    assert any(np.shares_memory(part, tensor.numpy()) for part in borrowed_by(a))
    array[:] = in_memory[:] = 7
    reconnect(a, b)
    came = receive_packed(b)
    assert [set(each) for each in came[1:]] == [{1}, {2}]


def test_a_bytearray_may_grow_as_soon_as_it_was_sent() -> None:
    a, _ = links()
    data = bytearray(LARGE)
    a.mark_broken()
    send_packed(a, data)
    data.extend(b"more")


def test_who_is_interrupted_while_sending_may_change_its_tensors() -> None:
    a, b = links()
    x = torch.arange(1 << 24).to(torch.uint8)
    was = x.numpy().tobytes()

    def interrupt() -> None:
        raise KeyboardInterrupt

    a.while_blocked = interrupt
    with pytest.raises(KeyboardInterrupt):
        a.send(Kind.CALL, 1, b"", [view(x)], b"", [x])
    x.fill_(0)
    a.while_blocked = a._wait_writable
    reconnect(a, b)
    [buffer] = receive(b).buffers
    assert bytes(memoryview(buffer)) == was  # type: ignore[arg-type]


def test_resuming_where_nothing_is_kept_any_more_is_refused() -> None:
    a, b = links()
    a.send(Kind.CALL, 1)
    receive(b)
    b.send(Kind.REPLY, 1)
    receive(a)
    a.mark_broken()
    with pytest.raises(SessionError, match="can be resumed"):
        a.resume(streams()[0], 0)


def test_what_was_acknowledged_is_kept_no_longer() -> None:
    a, b = links()
    for number in range(2000):
        a.send(Kind.CALL, number)
        receive(b)
        if b.has_unwritten:
            b.flush()
            assert a.receive() is None
    assert a.session.kept_frames < 600


# Ending.


def test_a_closed_link_refuses_to_send() -> None:
    a, _ = links()
    a.close()
    with pytest.raises(LinkClosed):
        a.send(Kind.CALL, 1)


def test_closing_frees_a_writer_that_waits_for_room() -> None:
    a, _ = links()
    x = torch.zeros(1 << 23, dtype=torch.uint8)
    sending = threading.Thread(target=a.send, args=(Kind.CALL, 1, b"", [view(x)]))
    sending.start()
    time.sleep(0.05)
    assert sending.is_alive()
    a.close()
    sending.join(30)
    assert not sending.is_alive()


def test_a_send_returns_at_its_deadline_and_the_frame_arrives_as_it_was() -> None:
    """The writer and those who wait behind it: all are let go, and none may spoil its frame."""
    a, b = links()
    tensors = [torch.full((1 << 22,), number, dtype=torch.uint8) for number in range(4)]

    def send(number: int) -> float:
        started = time.monotonic()
        deadline = started + 0.3
        a.send(Kind.CALL, number, b"", [view(tensors[number])], deadline=deadline)
        tensors[number].fill_(99)
        return time.monotonic() - started

    with ThreadPoolExecutor(4) as pool:
        seconds = list(pool.map(send, range(4)))
    assert all(0.2 < each < 20 for each in seconds), seconds
    assert a.has_unwritten
    flushing = threading.Thread(target=a.flush)
    flushing.start()
    frames = [receive(b) for _ in range(4)]
    flushing.join(30)
    for frame in frames:
        buffer = np.frombuffer(frame.buffers[0], np.uint8)  # type: ignore[arg-type]
        assert (buffer == frame.call_id).all()


# What is not ours.

BAD = {
    "unknown kind": HEADER.pack(77, 0, 0, 0, 0, 0, 0, 1, 0, 1),
    "oversized frame": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 1 << 50, 1, 0, 1),
    "oversized metadata": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 1 << 31, 1 << 32, 1, 0, 1),
    "oversized note": HEADER.pack(Kind.CALL, 0, 1 << 31, 0, 0, 0, 1 << 32, 1, 0, 1),
    "too many rows": HEADER.pack(Kind.CALL, 0, 0, 1 << 31, 0, 0, 1 << 36, 1, 0, 1),
    "parts longer than frame": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 9, 3, 1, 0, 1) + b"abc",
    "frame longer than parts": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 1, 3, 1, 0, 1) + b"abc",
    "gap": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 0, 5, 0, 1),
    "acknowledges the future": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 0, 1, 5, 1),
    "gives back what was not lent": HEADER.pack(Kind.CALL, 0, 0, 0, 1, 0, 8, 1, 0, 1) + bytes(8),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_frame_is_refused_before_anything_is_allocated(name: str) -> None:
    near, far = socket.socketpair()
    link = Link(PlainStream(far), limits=FrameLimits(1 << 40, 1 << 30, 1 << 20))
    near.sendall(BAD[name])
    with pytest.raises(CodecError):
        receive(link)


@pytest.mark.parametrize("large", [False, True])
def test_shared_memory_that_was_not_lent_cannot_be_given_back(large: bool) -> None:
    near, far = socket.socketpair()
    link = Link(PlainStream(far), arena=Arena(1 << 20))
    meta = bytes(70_000) if large else b""
    total = 8 + len(meta)
    near.sendall(HEADER.pack(Kind.CALL, 0, 0, 0, 1, len(meta), total, 1, 0, 1) + bytes(8) + meta)
    with pytest.raises(CodecError, match="gives back shared memory wrongly"):
        receive(link)


def test_a_frame_for_which_there_is_no_memory_is_refused() -> None:
    near, far = socket.socketpair()
    link = Link(PlainStream(far), limits=FrameLimits(1 << 62, 1 << 30, 1 << 20))
    huge = 1 << 60
    row = struct.pack("<QQ", huge, INLINE)
    near.sendall(HEADER.pack(Kind.CALL, 0, 0, 1, 0, 0, 16 + huge, 1, 0, 1) + row)
    with pytest.raises(CodecError, match="no memory for a frame"):
        receive(link)


def test_a_frame_for_whose_metadata_there_is_no_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    huge = 1 << 30

    def little(size: int) -> bytearray:
        if size > 1 << 20:
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr(receiving, "bytearray", little, raising=False)
    near, far = socket.socketpair()
    link = Link(PlainStream(far), limits=FrameLimits(1 << 62, huge, 1 << 20))
    near.sendall(HEADER.pack(Kind.CALL, 0, 0, 0, 0, huge, huge, 1, 0, 1))
    with pytest.raises(CodecError, match="no memory for a frame"):
        receive(link)


def test_a_large_frame_of_housekeeping_is_no_message() -> None:
    near, far = socket.socketpair()
    link = Link(PlainStream(far))
    meta = bytes(70_000)
    near.sendall(HEADER.pack(Kind.HOUSEKEEPING, 0, 0, 0, 0, len(meta), len(meta), 1, 0, 0) + meta)
    near.sendall(HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 0, 2, 0, 7))
    assert receive(link).call_id == 7


def test_random_bytes_never_pass_for_more_than_frames() -> None:
    print(f"seed {SEED}")
    numbers = random.Random(SEED)
    limits = FrameLimits(1 << 20, 1 << 16, 64)
    for _ in range(300):
        near, far = socket.socketpair()
        stream = PlainStream(far)
        stream.set_receive_timeout(0.01)
        link = Link(stream, limits=limits)
        data = bytearray(numbers.randbytes(numbers.randrange(1, 300)))
        if numbers.random() < 0.7:
            # A header that is nearly right gets further.
            head = bytearray(HEADER.pack(Kind.CALL, 0, 2, 1, 0, 4, 40, 1, 0, 1))
            head[numbers.randrange(HEADER_SIZE)] = numbers.randrange(256)
            data = head + data
        near.sendall(data)
        near.close()
        with pytest.raises((CodecError, LinkBroken)):
            receive_for_ever(link)


def receive_for_ever(link: Link) -> None:
    while True:
        link.receive()


class Slow:
    """A stream whose writer is slow to come back from the kernel."""

    def __init__(self, stream: PlainStream) -> None:
        self._stream = stream
        self.wrote, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def try_send(self, parts: Any) -> int:
        sent = self._stream.try_send(parts)
        self.wrote.set()
        self.go_on.wait(30)
        return sent


def test_who_drains_a_link_may_close_it_although_another_thread_writes() -> None:
    a, b = links()
    slow = Slow(a.stream)
    a.stream = slow
    writing = threading.Thread(target=a.send, args=(Kind.REPLY, 1, b"last"))
    writing.start()
    assert slow.wrote.wait(30)

    def leave() -> None:
        a.send(Kind.LEAVING, 0)
        a.drain(time.monotonic() + 10)
        a.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    slow.go_on.set()
    assert [receive(b).kind, receive(b).kind] == [Kind.REPLY, Kind.LEAVING]
    leaving.join(30)
    writing.join(30)


def test_shared_memory_that_was_freed_waits_for_a_message_and_not_for_long() -> None:
    freed: deque[int] = deque()
    link, other = links()
    link.freed = freed
    assert link.tidy_in(0.0) == math.inf
    freed.append(4096)
    assert link.tidy_in(0.0) == FREED_MAY_WAIT
    assert link.tidy_in(FREED_MAY_WAIT / 2) == pytest.approx(FREED_MAY_WAIT / 2)
    assert link.tidy_in(FREED_MAY_WAIT) == 0.0
    assert link.tidy_in(9.0) == 0.0
    link.tidy()
    assert not freed
    assert link.tidy_in(9.0) == math.inf
    link.close()
    other.close()


def test_shared_memory_waits_anew_after_a_message_took_along_what_was_freed_before() -> None:
    """Else, where there is something at each look, each look would send a message of its own."""
    link, other = links()
    link.freed.append(4096)
    assert link.tidy_in(0.0) == FREED_MAY_WAIT
    link.send(Kind.POST, 0)
    link.freed.append(8192)
    assert link.tidy_in(FREED_MAY_WAIT) == FREED_MAY_WAIT
    # More than a message can take along: the rest has waited since.
    link.freed.extend(range(MAX_FREED_PER_FRAME))
    link.send(Kind.POST, 0)
    assert len(link.freed) == 1
    assert link.tidy_in(2 * FREED_MAY_WAIT) == 0.0
    link.close()
    other.close()


def test_what_is_on_the_queue_does_not_wait_with_what_was_freed() -> None:
    link, other = links()
    link.send(Kind.POST, 1, later=True)
    assert link.tidy_in(0.0) == 0.0
    link.tidy()
    assert receive(other).call_id == 1
    assert link.tidy_in(0.0) == math.inf
    link.freed.append(4096)
    link.send(Kind.POST, 2, later=True)
    assert link.tidy_in(0.0) == 0.0
    link.mark_broken()
    # It leaves when the link is mended.
    assert link.tidy_in(0.0) == math.inf
    link.close()
    other.close()
