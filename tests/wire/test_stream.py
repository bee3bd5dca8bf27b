"""Plain and TLS streams keep the same promises, so the same tests run over both."""

from __future__ import annotations

import gc
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from telegrad.wire.keys import JobKey, new_key, tls_contexts
from telegrad.wire.stream import PlainStream, Stream
from telegrad.wire.tls import TlsError, TlsStream, _pieces

KEY = JobKey(b"the key of a test job")
WAIT = 10

Pair = tuple[Stream, Stream]
Sockets = tuple[socket.socket, socket.socket]


def unix_sockets() -> Sockets:
    return socket.socketpair()


def tcp_sockets() -> Sockets:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return client, server


def plain(sockets: Sockets) -> Pair:
    return PlainStream(sockets[0]), PlainStream(sockets[1])


def shake_hands(
    sockets: Sockets, client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[TlsStream | TlsError, TlsStream | TlsError]:
    def end(
        sock: socket.socket, context: ssl.SSLContext, server_side: bool
    ) -> TlsStream | TlsError:
        try:
            return TlsStream(sock, context, server_side=server_side, timeout=WAIT, peer="bob")
        except TlsError as error:
            return error

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(end, sockets[1], server, True)
        here = end(sockets[0], client, False)
        return here, there.result(WAIT)


def tls(sockets: Sockets) -> Pair:
    server, client = tls_contexts(KEY)
    here, there = shake_hands(sockets, client, server)
    assert isinstance(here, TlsStream)
    assert isinstance(there, TlsStream)
    return here, there


@pytest.fixture(params=["plain-unix", "plain-tcp", "tls-unix", "tls-tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    layer, _, family = request.param.partition("-")
    make: Callable[[Sockets], Pair] = plain if layer == "plain" else tls
    streams = make(unix_sockets() if family == "unix" else tcp_sockets())
    for stream in streams:
        stream.set_receive_timeout(WAIT)
    yield streams
    for stream in streams:
        stream.close()


def send_all(stream: Stream, parts: list[bytes | memoryview]) -> None:
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    while views:
        sent = stream.try_send(views)
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if views:
            views[0] = views[0][sent:]
            assert stream.wait_writable(WAIT), "the peer stopped reading"


def receive_all(stream: Stream, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        count = stream.recv_into(view[filled:])
        assert count > 0, f"the stream ended after {filled} of {size} bytes"
        filled += count
    return bytes(data)


def fill(stream: Stream) -> int:
    """Send until the stream takes no more."""
    block, total = memoryview(bytes(1 << 16)), 0
    while True:
        sent = stream.try_send([block])
        total += sent
        if sent == 0:
            return total


def test_bytes_arrive_in_both_directions(pair: Pair) -> None:
    here, there = pair
    send_all(here, [b"to ", memoryview(b"the "), b"", b"other end"])
    assert receive_all(there, 16) == b"to the other end"
    send_all(there, [b"and back"])
    assert receive_all(here, 8) == b"and back"


def test_large_payloads_cross_in_both_directions_at_once(pair: Pair) -> None:
    size = 24 << 20
    seed = 11
    print(f"seed {seed}")
    payloads = [np.random.default_rng(seed + end).bytes(size) for end in (0, 1)]
    parts = [[p[:7], memoryview(p)[7:1000], memoryview(p)[1000:]] for p in payloads]
    with ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send_all, s, p) for s, p in zip(pair, parts, strict=True)]
        receiving = [pool.submit(receive_all, s, size) for s in pair]
        for future in sending:
            future.result(WAIT)
        assert receiving[0].result(WAIT) == payloads[1]
        assert receiving[1].result(WAIT) == payloads[0]


def test_many_threads_may_write_in_turn_while_one_reads(pair: Pair) -> None:
    here, there = pair
    turn = threading.Lock()
    writers, messages, size = 6, 30, 50_000

    def write(number: int) -> None:
        for _ in range(messages):
            with turn:
                send_all(here, [bytes([number]), bytes([number]) * (size - 1)])

    with ThreadPoolExecutor(writers + 1) as pool:
        reading = pool.submit(receive_all, there, writers * messages * size)
        for future in [pool.submit(write, number) for number in range(writers)]:
            future.result(WAIT)
        data = np.frombuffer(reading.result(WAIT), np.uint8).reshape(-1, size)
    assert (data == data[:, :1]).all(), "a message was torn"
    assert np.bincount(data[:, 0]).tolist() == [messages] * writers


def test_a_stream_cut_into_odd_pieces_arrives_whole(pair: Pair) -> None:
    here, there = pair
    generator = np.random.default_rng(5)
    payload = generator.bytes(3 << 20)
    cuts = sorted(generator.integers(0, len(payload), 2000).tolist())
    edges = zip([0, *cuts], [*cuts, len(payload)], strict=True)
    parts: list[bytes | memoryview] = [payload[start:end] for start, end in edges]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(receive_all, there, len(payload))
        send_all(here, parts)
        assert reading.result(WAIT) == payload


def test_sending_never_blocks_and_goes_on_when_there_is_room(pair: Pair) -> None:
    here, there = pair
    counted = fill(here)
    assert counted > 0
    assert here.try_send([b"\0"]) == 0
    assert not here.wait_writable(0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(receive_all, there, counted + 1000)
        send_all(here, [bytes(1000)])
        assert reading.result(WAIT) == bytes(counted + 1000)


def test_every_byte_counted_was_sent_once(pair: Pair) -> None:
    """A slow reader makes nearly every send a short one."""
    here, there = pair
    payload = np.random.default_rng(3).bytes(6 << 20)
    received = bytearray()

    def read() -> None:
        view = memoryview(bytearray(3001))
        while len(received) < len(payload):
            count = there.recv_into(view)
            assert count > 0
            received.extend(view[:count])

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        send_all(here, [payload])
        reading.result(WAIT)
    assert bytes(received) == payload


def test_more_parts_than_the_system_takes_are_sent_by_turns(pair: Pair) -> None:
    here, there = pair
    parts: list[bytes | memoryview] = [bytes([n % 251]) for n in range(5000)]
    send_all(here, parts)
    assert receive_all(there, 5000) == b"".join(bytes(part) for part in parts)


def test_parts_may_have_any_shape_and_be_empty(pair: Pair) -> None:
    here, there = pair
    matrix = np.arange(6, dtype=np.int32).reshape(2, 3)
    empty = np.empty((0, 3), np.float32)
    sent = here.try_send([memoryview(empty), memoryview(matrix), b""])
    assert sent == matrix.nbytes
    assert receive_all(there, matrix.nbytes) == matrix.tobytes()


def test_a_timeout_is_no_end(pair: Pair) -> None:
    here, there = pair
    view = memoryview(bytearray(9))
    there.set_receive_timeout(0.001)
    assert there.recv_into(view) == -1
    assert there.recv_into(view) == -1
    send_all(here, [b"late"])
    there.set_receive_timeout(None)
    assert there.recv_into(view) == 4
    assert bytes(view[:4]) == b"late"


def when_received(stream: Stream, view: memoryview) -> int:
    """What comes of reads that wait for nothing, once it is not that there are no bytes."""
    until = time.monotonic() + WAIT
    while (count := stream.try_recv_into(view)) < 0 and time.monotonic() < until:
        time.sleep(0.001)
    return count


def test_bytes_that_are_here_can_be_read_without_waiting(pair: Pair) -> None:
    here, there = pair
    there.set_receive_timeout(None)
    view = memoryview(bytearray(9))
    assert there.try_recv_into(view) == -1
    send_all(here, [b"soon"])
    assert when_received(there, view) == 4
    assert bytes(view[:4]) == b"soon"
    assert there.try_recv_into(view) == -1
    here.close()
    assert when_received(there, view) == 0


def test_half_of_a_record_is_not_waited_for() -> None:
    sockets = tcp_sockets()
    here, there = tls(sockets)
    there.set_receive_timeout(None)
    assert isinstance(here, TlsStream)
    record = here._encrypt(memoryview(b"in two halves"))
    view = memoryview(bytearray(99))
    sockets[0].sendall(record[:9])
    assert select.select([there], [], [], WAIT)[0]
    assert there.try_recv_into(view) == -1
    sockets[0].sendall(record[9:])
    assert when_received(there, view) == 13
    assert bytes(view[:13]) == b"in two halves"


def test_a_closed_peer_is_the_end_for_both_directions(pair: Pair) -> None:
    here, there = pair
    there.close()
    there.close()
    assert here.recv_into(memoryview(bytearray(9))) == 0
    assert there.recv_into(memoryview(bytearray(9))) == 0
    with pytest.raises(ConnectionError):
        fill(here)
    assert here.loss is not None
    assert here.wait_writable(WAIT), "an error is something to be told of"


def test_what_was_sent_before_the_end_arrives(pair: Pair) -> None:
    here, there = pair
    send_all(here, [b"last words"])
    here.close()
    assert receive_all(there, 10) == b"last words"
    assert there.recv_into(memoryview(bytearray(9))) == 0


def test_a_reset_is_the_end() -> None:
    client, server = tcp_sockets()
    stream = PlainStream(client)
    reset_on_close = b"\1\0\0\0\0\0\0\0"
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
    server.close()
    assert stream.recv_into(memoryview(bytearray(9))) == 0
    assert isinstance(stream.loss, ConnectionResetError)
    stream.close()


def test_closing_wakes_a_reader_in_another_thread(pair: Pair) -> None:
    here, _ = pair
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(here.recv_into, memoryview(bytearray(9)))
        here.close()
        assert reading.result(WAIT) == 0


def test_a_descriptor_lives_as_long_as_its_stream() -> None:
    """A number that is closed early can come to mean another connection."""
    client, server = unix_sockets()
    stream = PlainStream(client)
    number = stream.fileno()
    stream.close()
    os.fstat(number)
    del stream, client
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    server.close()


def test_plain_streams_hold_nothing_back() -> None:
    here, there = plain(unix_sockets())
    send_all(here, [b"abc"])
    there.recv_into(memoryview(bytearray(1)))
    assert there.pending() == 0
    here.close()


def test_tls_tells_what_it_holds_back() -> None:
    here, there = tls(unix_sockets())
    assert there.pending() == 0
    send_all(here, [b"abc"])
    there.recv_into(memoryview(bytearray(1)))
    assert there.pending() > 0
    assert receive_all(there, 2) == b"bc"
    assert there.pending() == 0
    here.close()


def test_tls_bytes_on_the_wire_are_not_the_plain_ones() -> None:
    left, right = unix_sockets(), unix_sockets()
    seen = bytearray()

    def relay(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)

    relays = [(left[1], right[0]), (right[0], left[1])]
    threads = [threading.Thread(target=relay, args=ends) for ends in relays]
    for thread in threads:
        thread.start()
    here, there = tls((left[0], right[1]))
    send_all(here, [b"a secret tensor" * 10])
    receive_all(there, 150)
    assert len(seen) > 150
    assert b"secret" not in seen
    here.close()
    there.close()
    for thread, (source, _) in zip(threads, relays, strict=True):
        thread.join(WAIT)
        source.close()


@pytest.mark.parametrize("stranger", ["client", "server"])
def test_another_key_is_refused_on_both_ends_of_tls(stranger: str) -> None:
    server, client = tls_contexts(KEY)
    other_server, other_client = tls_contexts(new_key())
    if stranger == "client":
        outcomes = shake_hands(tcp_sockets(), other_client, server)
    else:
        outcomes = shake_hands(tcp_sockets(), client, other_server)
    for outcome in outcomes:
        assert isinstance(outcome, TlsError)
        assert "bob" in str(outcome)
        assert "TELEGRAD_KEY" in str(outcome)


def test_a_peer_that_does_not_speak_tls_is_named() -> None:
    here, there = unix_sockets()
    _, client = tls_contexts(KEY)
    there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(TlsError, match="whether both expect TLS"):
        TlsStream(here, client, server_side=False, timeout=WAIT)
    there.close()


def test_a_peer_that_says_nothing_is_given_up() -> None:
    here, there = unix_sockets()
    _, client = tls_contexts(KEY)
    with pytest.raises(TlsError, match="did not finish the TLS handshake in time"):
        TlsStream(here, client, server_side=False, timeout=0.05)
    assert there.recv(1 << 16), "the client began"
    assert there.recv(1) == b"", "and hung up"
    there.close()


def test_damage_on_the_way_ends_a_tls_stream() -> None:
    sockets = unix_sockets()
    raw = socket.socket(fileno=os.dup(sockets[0].fileno()))
    here, there = tls(sockets)
    raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert there.recv_into(memoryview(bytearray(9))) == 0
    assert isinstance(there.loss, ssl.SSLError)
    raw.close()
    here.close()


def test_small_neighbours_share_a_record_and_large_parts_are_not_copied() -> None:
    large = np.zeros(300_000, np.uint8)
    pieces = list(_pieces([b"head", b"meta", memoryview(large), b"t", b"ail"], skip=1))
    assert [bytes(piece) for piece in (pieces[0], pieces[-1])] == [b"eadmeta", b"tail"]
    assert sum(len(piece) for piece in pieces) == 300_011
    assert all(np.shares_memory(np.asarray(piece), large) for piece in pieces[1:-1])


@pytest.mark.parametrize("sockets", [unix_sockets, tcp_sockets])
def test_in_a_crowd_a_short_message_leaves_without_giving_up_the_interpreter(
    sockets: Callable[[], Sockets],
) -> None:
    here, there = plain(sockets())
    here.crowd = ("somebody who waits",)
    turns, over = [0], threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            turns[0] += 1

    interval = sys.getswitchinterval()
    other = threading.Thread(target=take_turns)
    buffer = memoryview(bytearray(100))
    try:
        other.start()
        # From here on nobody is made to give the interpreter up.
        sys.setswitchinterval(100.0)
        before = turns[0]
        for _ in range(100):
            assert here.try_send([b"x" * 10]) == 10
        assert turns[0] == before
    finally:
        over.set()
        sys.setswitchinterval(interval)
        other.join()
    read = 0
    while read < 1000:
        read += there.recv_into(buffer)


def test_in_a_crowd_a_full_stream_takes_nothing_and_an_ended_one_says_so() -> None:
    here, there = plain(unix_sockets())
    here.crowd = ("somebody who waits",)
    while here.try_send([b"x" * 1000]):
        pass
    there.close()
    with pytest.raises(ConnectionError):
        here.try_send([b"x" * 1000])
