"""Would several connections carry a large tensor faster than one? `python -m benchmarks.streams`

Two processes on loopback, one tensor, cut into as many parts as there are connections; each part is
written and read by a thread of its own, in the clear and under TLS, with the streams of production.
telegrad uses two for large tensors in the clear (`wire/lane.py`), and one else. The cases take
turns, and what is compared are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from benchmarks import pages
from telegrad.wire.keys import JobKey, tls_contexts
from telegrad.wire.stream import PlainStream, Stream
from telegrad.wire.tls import TlsStream

SIZE = 64 << 20
COUNTS = (1, 2, 4)
WAYS = ("in the clear", "under TLS")
ROUNDS = 7
PATIENCE = 30.0

Tls = tuple[ssl.SSLContext, ssl.SSLContext]


def opened(sock: socket.socket, way: str, tls: Tls, *, server: bool) -> Stream:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if way == "in the clear":
        return PlainStream(sock)
    context = tls[0 if server else 1]
    return TlsStream(sock, context, server_side=server, timeout=PATIENCE, peer="the other")


def in_threads(work: Callable[[int], None], count: int) -> None:
    if count == 1:
        return work(0)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return None


def parts_of(tensor: memoryview, count: int) -> list[memoryview]:
    size = len(tensor) // count
    return [tensor[number * size : (number + 1) * size] for number in range(count)]


def write_all(stream: Stream, part: memoryview) -> None:
    while part:
        sent = stream.try_send([part])
        part = part[sent:]
        if part and not sent:
            stream.wait_writable(PATIENCE)


def read_all(stream: Stream, part: memoryview) -> None:
    while part:
        count = stream.recv_into(part)
        if count <= 0:
            raise ConnectionError("the other end is gone")
        part = part[count:]


def answer(listener: socket.socket, key: bytes) -> None:
    """Read each tensor, and say one byte when all of it is here."""
    tls = tls_contexts(JobKey(key))
    tensor = np.empty(SIZE, np.uint8).data
    for way in WAYS:
        for count in COUNTS:
            streams = [opened(listener.accept()[0], way, tls, server=True) for _ in range(count)]
            parts = parts_of(tensor, count)
            threading.Thread(target=answer_case, args=(streams, parts), daemon=True).start()
    threading.Event().wait()


def answer_case(streams: list[Stream], parts: list[memoryview]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while True:
            in_threads(lambda number: read_all(streams[number], parts[number]), len(streams))
            streams[0].try_send([b"!"])


def seconds(streams: list[Stream], parts: list[memoryview]) -> float:
    start = time.perf_counter()
    in_threads(lambda number: write_all(streams[number], parts[number]), len(streams))
    read_all(streams[0], memoryview(bytearray(1)))
    return time.perf_counter() - start


def measure(rounds: int) -> dict[tuple[str, int], float]:
    key = os.urandom(32)
    tls = tls_contexts(JobKey(key))
    tensor = np.ones(SIZE, np.uint8).data
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        other = multiprocessing.get_context("fork").Process(
            target=answer, args=(listener, key), daemon=True
        )
        other.start()
        cases: dict[tuple[str, int], list[Stream]] = {}
        for way in WAYS:
            for count in COUNTS:
                socks = [socket.create_connection(listener.getsockname()) for _ in range(count)]
                cases[way, count] = [opened(sock, way, tls, server=False) for sock in socks]
        times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for _ in range(rounds + 1):
            for case, streams in cases.items():
                times[case].append(seconds(streams, parts_of(tensor, case[1])))
        other.kill()
    return {case: statistics.median(each[1:]) for case, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="write the table to the docs")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    head = [f"{SIZE >> 20} MB", *(f"{n} connection{'s' * (n > 1)}" for n in COUNTS)]
    rows = [
        [way, *(f"{SIZE / found[way, count] / 1e9:.2f} GB/s" for count in COUNTS)] for way in WAYS
    ]
    print(pages.plain(head, rows))
    if arguments.write:
        pages.write_section("streams", pages.markdown(head, rows))


if __name__ == "__main__":
    main()
