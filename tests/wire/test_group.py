"""Tensors that travel through a process group beside their frames, over real sockets and gloo."""

from __future__ import annotations

import atexit
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from telegrad.wire import group as group_module
from telegrad.wire import torch_private
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import GROUP, HEADER, Frame, FrameLimits, Kind
from telegrad.wire.group import (
    THRESHOLD,
    GroupFailed,
    TensorGroup,
    _Backend,
    check_backend,
    form_group,
)
from telegrad.wire.link import Link, LinkBroken, LinkClosed
from tests.wire.test_link import receive, streams, view

SEED = 20261117


class Channel:
    """What the two ends speak through while they form a group."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(10)
        self._socket = sock

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read_exactly(self, count: int) -> bytes:
        data = self._socket.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            raise ConnectionError("cut short")
        return data


def form(backend: str = "gloo", other: str = "gloo") -> list[TensorGroup | None]:
    ends = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda end: form_group(end[2], Channel(end[1]), end[0], "127.0.0.1"),
                ((0, ends[0], backend), (1, ends[1], other)),
            )
        )


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    groups = form()
    ends = tuple(Link(stream, group=group) for stream, group in zip(streams(), groups, strict=True))
    yield ends  # type: ignore[misc]
    for link in ends:
        link.close()


def mend(a: Link, b: Link) -> None:
    """As two workers do: a new connection, a new group, and each sends what is missing again."""
    a.mark_broken()
    b.mark_broken()
    seen_by_a, seen_by_b = a.session.seen, b.session.seen
    ends, groups = streams(), form()
    a.resume(ends[0], seen_by_b, groups[0])
    b.resume(ends[1], seen_by_a, groups[1])
    for link in (a, b):
        threading.Thread(target=link.flush, daemon=True).start()


def numbers(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8)


def sending(link: Link, *tensors: torch.Tensor, call_id: int = 1, **options: float) -> Thread:
    buffers = [view(tensor) for tensor in tensors]
    return Thread(
        lambda: link.send(
            Kind.CALL,
            call_id,
            b"meta",
            buffers,
            b"note",
            tensors,
            **options,  # type: ignore[arg-type]
        )
    )


class Thread(threading.Thread):
    """Keeps what its work raised."""

    def __init__(self, work: object) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()  # type: ignore[operator]
        except BaseException as error:
            self.error = error

    def ended(self) -> bool:
        self.join(30)
        return not self.is_alive()


def bytes_of(frame: Frame) -> list[bytes]:
    return [bytes(memoryview(buffer)) for buffer in frame.buffers]  # type: ignore[arg-type]


def test_a_group_of_two_leaves_torch_distributed_alone() -> None:
    groups = form()
    assert all(group is not None for group in groups)
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [1, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, 5_000_000])
def test_tensors_of_every_size_arrive_as_they_were(links: tuple[Link, Link], size: int) -> None:
    a, b = links
    tensors = numbers(size), numbers(3), numbers(2 * THRESHOLD)
    sender = sending(a, *tensors)
    frame = receive(b)
    assert bytes_of(frame) == [tensor.numpy().tobytes() for tensor in tensors]
    assert (frame.meta, frame.note, frame.call_id) == (b"meta", b"note", 1)
    assert sender.ended()
    assert sender.error is None


def test_large_tensors_do_not_pass_through_the_stream(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = links
    read: list[int] = []
    recv_into = b.stream.recv_into
    monkeypatch.setattr(b.stream, "recv_into", lambda to: read.append(recv_into(to)) or read[-1])
    sender = sending(a, numbers(1_000_000))
    receive(b)
    assert sender.ended()
    assert 0 < sum(read) < 1000
    assert b.received_bytes > 1_000_000


def test_many_threads_send_both_ways_and_no_tensor_is_another(links: tuple[Link, Link]) -> None:
    draw = random.Random(SEED)
    sizes = [draw.choice([10, THRESHOLD, 3 * THRESHOLD, 1_000_000]) for _ in range(60)]

    def send(link: Link, number: int) -> None:
        data = torch.full((sizes[number],), number % 251, dtype=torch.uint8)
        link.send(Kind.CALL, number, b"", [view(data)], tensors=[data])
        data.fill_(255)

    def take(link: Link) -> list[Frame]:
        return [receive(link) for _ in range(60)]

    with ThreadPoolExecutor(10) as pool:
        taking = [pool.submit(take, link) for link in links]
        sent = [pool.submit(send, link, n) for n in range(60) for link in links]
        for each in sent:
            each.result(30)
        for frames in taking:
            for frame in frames.result(30):
                array = np.frombuffer(frame.buffers[0], np.uint8)  # type: ignore[arg-type]
                assert len(array) == sizes[frame.call_id]
                assert (array == frame.call_id % 251).all()


def test_a_tensor_under_way_when_the_connection_breaks_comes_once_over_the_next(
    links: tuple[Link, Link],
) -> None:
    a, b = links
    x = numbers(1_000_000)
    was = x.numpy().tobytes()
    sender = sending(a, x)
    while not a.sent_bytes:
        time.sleep(0.001)
    a.mark_broken()
    assert sender.ended()
    x.fill_(0)
    mend(a, b)
    assert bytes_of(receive(b)) == [was]
    again = sending(a, numbers(1_000_000), call_id=2)
    assert receive(b).call_id == 2
    assert again.ended()
    assert b.session.seen == 2


def test_a_bytearray_whose_frame_was_lost_comes_as_it_was_when_it_was_sent(
    links: tuple[Link, Link],
) -> None:
    """The group has carried it, so its sender was let go, and the frame is cut with the stream."""
    a, b = links
    data = bytearray(b"\1" * 1_000_000)
    assert b._group is not None
    arrival = b._group.expect(1, len(data))
    sender = Thread(lambda: a.send(Kind.CALL, 1, b"meta", [memoryview(data)], b"note", untracked=1))
    assert sender.ended()
    assert arrival.is_here(10)
    data[:] = b"\7" * len(data)
    mend(a, b)
    assert bytes_of(receive(b)) == [b"\1" * 1_000_000]


def test_when_the_group_fails_the_connection_is_made_anew(links: tuple[Link, Link]) -> None:
    a, b = links
    assert b._group is not None
    b._group.close()
    x = numbers(1_000_000)
    sender = sending(a, x)
    with pytest.raises(LinkBroken):
        receive(b)
    assert sender.ended()
    assert a.broken
    mend(a, b)
    assert bytes_of(receive(b)) == [x.numpy().tobytes()]


def test_at_its_deadline_a_send_returns_and_its_tensor_comes_as_it_was(
    links: tuple[Link, Link],
) -> None:
    a, b = links
    x = numbers(1_000_000)
    was = x.numpy().tobytes()
    sender = sending(a, x, deadline=time.monotonic() + 0.2)
    assert sender.ended(), "though nobody reads"
    assert sender.error is None
    x.fill_(0)
    mend(a, b)
    assert bytes_of(receive(b)) == [was]


def test_closing_lets_go_who_sends_and_who_receives(links: tuple[Link, Link]) -> None:
    a, b = links
    sender = sending(a, numbers(1_000_000))
    assert b._group is not None
    receiver = Thread(lambda: b._group.expect(77, 1_000_000).is_here(30))  # type: ignore[union-attr]
    while not a.sent_bytes:
        time.sleep(0.001)
    a.close()
    assert sender.ended()
    assert isinstance(sender.error, LinkClosed)
    b.close()
    assert receiver.ended()
    assert isinstance(receiver.error, GroupFailed)


def test_a_frame_may_not_refer_to_a_group_that_is_not_there() -> None:
    one, other = streams()
    link = Link(other)
    table = struct.pack("<2Q", 100_000, GROUP + 1)
    one.try_send([HEADER.pack(Kind.CALL, 0, 0, 1, 0, 0, len(table), 1, 0, 1) + table])
    with pytest.raises(CodecError, match="process group that this link does not have"):
        receive(link)


def test_a_frame_may_not_announce_more_than_the_limit() -> None:
    one, other = streams()
    group = form()[1]
    link = Link(other, group=group, limits=FrameLimits(frame_bytes=1 << 20))
    table = struct.pack("<2Q", 1 << 40, GROUP + 1)
    one.try_send([HEADER.pack(Kind.CALL, 0, 0, 1, 0, 0, len(table), 1, 0, 1) + table])
    with pytest.raises(CodecError, match="more bytes than the limit"):
        receive(link)


def test_if_one_end_can_form_no_group_neither_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch_private.group_of_two

    def make_or_fail(backend: str, store: object, rank: int, host: str) -> object:
        if backend == "none":
            raise RuntimeError("no such device")
        return make(backend, store, rank, host)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_private, "group_of_two", make_or_fail)
    assert form("gloo", "none") == [None, None]


def test_a_connection_that_ends_while_a_group_is_formed_is_an_error() -> None:
    one, other = socket.socketpair()
    other.close()
    with pytest.raises(ConnectionError):
        form_group("gloo", Channel(one), 0, "127.0.0.1")


def test_a_group_for_which_there_is_no_thread_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(group_module, "_Follower", no_thread)
    with pytest.raises(ConnectionError, match="can't start new thread"):
        form()


def test_a_backend_is_asked_for_by_a_name_that_this_torch_has() -> None:
    check_backend("gloo")
    with pytest.raises(ValueError, match="give one of 'gloo', 'nccl'"):
        check_backend("carrier pigeon")
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match="has no nccl"):
            check_backend("nccl")


def test_at_exit_nobody_enters_the_backend_and_who_is_inside_is_awaited() -> None:
    backend = _Backend()
    atexit.unregister(backend._shut)
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with backend:
            entered.set()
            leave.wait(30)

    inside = Thread(stay)
    assert entered.wait(30)
    shutting = Thread(backend._shut)
    while not backend._is_shut:
        time.sleep(0.001)
    assert shutting.is_alive()
    with pytest.raises(GroupFailed, match="the process is ending"), backend:
        pass
    leave.set()
    assert inside.ended()
    assert shutting.ended()


def begin_frame(link: Link, size: int, meta: bytes = b"meta") -> tuple[torch.Tensor, object]:
    """All of a frame but the tensor that it announces; what is needed to send that, too."""
    group = link._group
    assert group is not None
    seq, ack = link.session.stamp()
    table = struct.pack("<2Q", size, GROUP + 1)
    total = len(table) + len(meta)
    head = HEADER.pack(Kind.CALL, 0, 0, 1, 0, len(meta), total, seq, ack, 1)
    link.stream.try_send([head + table + meta])
    tensor = numbers(size)
    return tensor, lambda: group.begin([view(tensor)])


def test_nobody_waits_for_a_frame_whose_tensor_is_under_way_as_if_it_were_here(
    links: tuple[Link, Link],
) -> None:
    """Who reads wakes those it has served before it waits for anything."""
    a, b = links
    a.send(Kind.REPLY, 7, b"small")
    tensor, send_tensor = begin_frame(a, 1_000_000)
    assert receive(b).call_id == 7
    assert not b.has_frame()
    assert b.is_halfway, "no byte of the stream will tell"
    send_tensor()  # type: ignore[operator]
    assert bytes_of(receive(b)) == [tensor.numpy().tobytes()]
    assert not b.is_halfway


@pytest.mark.parametrize("meta", [b"meta", b"m" * 100_000], ids=["small", "large"])
def test_who_reads_may_go_before_the_tensor_is_there(
    links: tuple[Link, Link], meta: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its deadline, or by Ctrl-C: whoever reads then has the frame, whole and once."""
    a, b = links
    tensor, send_tensor = begin_frame(a, 1_000_000, meta)
    b.stream.set_receive_timeout(0.01)
    while not b.is_halfway:
        assert b.receive() is None
    wait, interrupted = threading.Event.wait, []

    def interrupt(event: threading.Event, timeout: float | None = None) -> bool:
        monkeypatch.setattr(threading.Event, "wait", wait)
        interrupted.append(event)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        b.receive()
    assert interrupted
    assert b.receive() is None
    assert not b.has_frame()
    assert b.has_bytes(), "nobody leaves it to a watch over the stream"
    send_tensor()  # type: ignore[operator]
    assert bytes_of(receive(b)) == [tensor.numpy().tobytes()]
    assert not b.has_bytes()


def test_who_sends_and_is_interrupted_may_change_its_tensors(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = links
    x = numbers(30_000_000)
    was = x.numpy().tobytes()
    monkeypatch.setattr("telegrad.wire.group.Transfer.has_ended", interrupt_instead)
    sender = sending(a, x)
    assert sender.ended()
    assert isinstance(sender.error, KeyboardInterrupt)
    x.fill_(0)
    mend(a, b)
    assert bytes_of(receive(b)) == [was]


def interrupt_instead(*_: object) -> None:
    raise KeyboardInterrupt
