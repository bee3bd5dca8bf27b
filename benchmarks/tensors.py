"""How a large tensor travels best: `python -m benchmarks.tensors`.

The same echo over shared memory, a process group (gloo), TCP in the clear and TCP under TLS. Each
way is a job of two processes of its own on this machine; the four take turns in short windows, and
what is compared are medians. On one machine TCP and gloo have the fastest network that there is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import pages
from benchmarks.peers import free_port, show
from telegrad import rpc
from telegrad.rpc import rendezvous

SIZES = {"64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}
LOOPBACK = {"transports": ("tcp",), "host": "127.0.0.1"}
WAYS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "gloo": {"tensors": "gloo"},
    "TCP": LOOPBACK,
    "TLS": LOOPBACK,
}
LEAST_ECHOES = 3
WINDOW = 0.2


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def join(way: str, rank: int, port: int, key: bytes) -> None:
    torch.set_num_threads(1)
    if way == "TLS":
        # It listens as if others were to reach it over a network.
        rendezvous.is_loopback = lambda host: False
    method = f"tcp://127.0.0.1:{port}"
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, init_method=method, key=key, **WAYS[way])


def serve(way: str, port: int, key: bytes, before: Callable[[], None]) -> None:
    before()
    join(way, 1, port, key)
    rpc.shutdown()


def call(way: str, port: int, key: bytes, before: Callable[[], None], orders: Connection) -> None:
    """Time echoes of the sizes that are asked for, until 0 is."""
    before()
    join(way, 0, port, key)
    while elements := orders.recv():
        tensor, times = torch.ones(elements), []
        until = time.perf_counter() + WINDOW
        while len(times) < LEAST_ECHOES or time.perf_counter() < until:
            start = time.perf_counter()
            rpc.rpc_sync("w1", echo, args=(tensor,))
            times.append(time.perf_counter() - start)
        orders.send(times)
    rpc.shutdown()


def nothing() -> None:
    pass


def start(way: str, before: Callable[[], None] = nothing) -> Connection:
    """A job of two processes, each of which does `before` first; where to order echoes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    port, key = free_port(), secrets.token_bytes(32)
    spawn.Process(target=serve, args=(way, port, key, before), daemon=True).start()
    spawn.Process(target=call, args=(way, port, key, before, theirs), daemon=True).start()
    return ours


def measure(rounds: int) -> dict[str, dict[str, float]]:
    callers = {way: start(way) for way in WAYS}
    medians: dict[str, dict[str, float]] = {}
    for size, elements in SIZES.items():
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way, caller in callers.items():
                caller.send(elements)
                taken = caller.recv()
                times[way] += taken if number else []
        medians[size] = {way: statistics.median(each) for way, each in times.items()}
    for caller in callers.values():
        caller.send(0)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table to the docs")
    arguments = parser.parse_args()
    medians = measure(arguments.rounds)
    head = ["echo of", *(f"{way} ({'ratio' if n else 'time'})" for n, way in enumerate(WAYS))]
    rows = []
    for size, found in medians.items():
        first, *others = found.values()
        rows.append([size, show(first), *(f"{other / first:.1f}" for other in others)])
    print(pages.plain(head, rows))
    if arguments.write:
        pages.write_section("tensors", pages.markdown(head, rows))


if __name__ == "__main__":
    main()
