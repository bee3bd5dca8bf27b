"""What a step of training with remote parts takes at least: `python -m benchmarks.floor`.

The same steps as in `train.py`, by processes that have a socket between them and nothing else: no
names, no contexts, no references, no deadlines, no resends, and a part that knows by heart what
comes next. Each looks for its bytes before it sleeps, as workers of telegrad do. What lies between
that and telegrad is what its promises cost in Python; what it takes itself no library can avoid.

The same once more with a thread for each connection of a part shows what it costs if the next
message finds another thread than the last one.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import machine, pages, slices
from benchmarks.peers import PEERS
from benchmarks.train import (
    LOCAL,
    PARTS,
    RATE,
    SIZES,
    Size,
    as_one,
    build_part,
    local_case,
    lower_quartile,
    make_inputs,
    remote_case,
)
from benchmarks.train import PROGRAM as TRAIN

PROGRAM = "benchmarks.floor"
BARE = "bare"
THREADED = "bare, threads"
AS_ONE = "telegrad, as one"
LOOK_FOR = 0.01
BUFFER = 1 << 21
_HEADER = struct.Struct("<III")
_NOTHING = torch.empty(0, 0)


class Pipe:
    """One end of a connection that carries matrices."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, matrix: Tensor = _NOTHING) -> None:
        data = memoryview(matrix.detach().contiguous().numpy()).cast("B") if len(matrix) else b""
        header = _HEADER.pack(len(data), *matrix.shape)
        sent = self._socket.sendmsg([header, data])
        if sent < len(header) + len(data):
            self._socket.sendall(data[max(0, sent - len(header)) :])

    def receive(self) -> Tensor:
        until = time.monotonic() + LOOK_FOR
        while not self._poll.poll(0) and time.monotonic() < until:
            os.sched_yield()
        size, rows, columns = _HEADER.unpack(self._read(_HEADER.size))
        if not size:
            return _NOTHING
        return torch.frombuffer(self._read(size), dtype=torch.float32).view(rows, columns)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                sys.exit()  # The driver is gone.
            rest = rest[count:]
        return data


def _serve_part(
    size: Size, parts: int, number: int, before: Pipe, behind: Pipe, driver: Pipe
) -> None:
    torch.set_num_threads(1)
    part = build_part(size, parts, number)
    optimizer = torch.optim.SGD(part.parameters(), lr=RATE)
    while True:
        x = before.receive()
        if number:
            x.requires_grad_()
        output = part(x)
        behind.send(output)
        gradient = behind.receive()
        optimizer.zero_grad()
        output.backward(gradient)
        if x.grad is None:
            driver.send()
        else:
            before.send(x.grad)
        driver.receive()
        optimizer.step()
        driver.send()


def _serve_part_by_threads(
    size: Size, parts: int, number: int, before: Pipe, behind: Pipe, driver: Pipe
) -> None:
    torch.set_num_threads(1)
    part = build_part(size, parts, number)
    optimizer = torch.optim.SGD(part.parameters(), lr=RATE)
    under_way: list[tuple[Tensor, Tensor]] = []

    def go_forward() -> None:
        while True:
            x = before.receive()
            if number:
                x.requires_grad_()
            under_way.append((x, part(x)))
            behind.send(under_way[0][1])

    def go_back() -> None:
        while True:
            gradient = behind.receive()
            x, output = under_way.pop()
            optimizer.zero_grad()
            output.backward(gradient)
            if x.grad is None:
                driver.send()
            else:
                before.send(x.grad)

    for work in (go_forward, go_back):
        threading.Thread(target=work, daemon=True).start()
    while True:
        driver.receive()
        optimizer.step()
        driver.send()


def bare_step(
    size: Size, parts: int, serve_part: Callable[..., None] = _serve_part
) -> Callable[[], None]:
    along = [socket.socketpair() for _ in range(parts + 1)]
    across = [socket.socketpair() for _ in range(parts)]
    for number in range(parts):
        if not os.fork():
            ends = along[number][1], along[number + 1][0], across[number][1]
            mine = {end.fileno() for end in ends}
            for end in (end for pair in along + across for end in pair):
                if end.fileno() not in mine:
                    end.close()
            serve_part(size, parts, number, *map(Pipe, ends))
    first, last = Pipe(along[0][0]), Pipe(along[-1][1])
    workers = [Pipe(pair[0]) for pair in across]
    x, y = make_inputs(size)

    def step() -> None:
        first.send(x)
        output = last.receive().requires_grad_()
        cross_entropy(output, y).backward()
        assert output.grad is not None
        last.send(output.grad)
        workers[0].receive()
        for worker in workers:
            worker.send()
        for worker in workers:
            worker.receive()

    return step


def serve_bare(serve_part: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    slices.serve(
        {
            remote_case(name, parts): bare_step(size, parts, serve_part)
            for name, size in SIZES.items()
            for parts in PARTS
        }
    )


def measure(rounds: int, seconds: float) -> list[tuple[str, dict[str, float]]]:
    """By case, how much longer a step of each takes than the same step in one process."""
    found: dict[str, dict[str, list[float]]] = {}
    for share in slices.shares(rounds):
        local = slices.Sliced(TRAIN, LOCAL)
        peers = [slices.Sliced(PROGRAM, name) for name in (BARE, THREADED)]
        peers += [slices.Sliced(TRAIN, name, stops=name == "stock") for name in PEERS]
        with slices.started([local, *peers]):
            for size in SIZES:
                for parts in PARTS:
                    times = found.setdefault(remote_case(size, parts), {})
                    for _ in share:
                        _measure_case(local, peers, size, parts, seconds, times)
                        peers.reverse()
    rows = []
    for case, times in found.items():
        alone = lower_quartile(times.pop(LOCAL))
        rows.append((case, {name: lower_quartile(each) - alone for name, each in times.items()}))
    return rows


def _measure_case(
    local: slices.Sliced,
    peers: list[slices.Sliced],
    size: str,
    parts: int,
    seconds: float,
    times: dict[str, list[float]],
) -> None:
    """One slice of the step in one process, and one of each peer."""
    case = remote_case(size, parts)
    times.setdefault(LOCAL, []).append(_median(local, local_case(size), seconds))
    for peer in peers:
        times.setdefault(peer.name, []).append(_median(peer, case, seconds))
        if peer.name == "telegrad":
            times.setdefault(AS_ONE, []).append(_median(peer, as_one(case), seconds))


def _median(peer: slices.Sliced, case: str, seconds: float) -> float:
    times = sorted(peer.run(case, seconds))
    return times[len(times) // 2]


COLUMNS = (BARE, THREADED, AS_ONE, "telegrad", "stock")
HEAD = ["overhead of a step", *COLUMNS, "bare to stock", "as one to stock", "telegrad to stock"]


def rows_of(overheads: list[tuple[str, dict[str, float]]]) -> list[list[str]]:
    rows = []
    for case, over in overheads:
        times = [f"{over[each] * 1000:.2f} ms" for each in COLUMNS]
        ratios = [f"{over[each] / over['stock']:.2f}" for each in (BARE, AS_ONE, "telegrad")]
        rows.append([case, *times, *ratios])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=f"python -m {PROGRAM}")
    parser.add_argument("--rounds", type=int, default=16, help="how often each has its turn")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a turn takes")
    parser.add_argument("--write", action="store_true", help="write it to docs/performance.md")
    parser.add_argument("--serve", choices=(BARE, THREADED), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_bare(_serve_part if arguments.serve == BARE else _serve_part_by_threads)
        return
    rows = rows_of(measure(arguments.rounds, arguments.seconds))
    print(pages.plain(HEAD, rows))
    if arguments.write:
        text = f"Machine: {machine.describe()}.\n\n{pages.markdown(HEAD, rows)}"
        pages.write_section("floor", text)


if __name__ == "__main__":
    main()
