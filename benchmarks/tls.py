"""What TLS costs: calls over TCP on loopback, in the clear and under TLS, interleaved.

Run it as `python -m benchmarks.tls`. One process calls two others, one over each; the two take
turns in short windows, and what is compared are medians. Loopback stands for a network here: it
has the least of everything else, so the share of TLS is the largest that it can be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import statistics
import time

import torch

from benchmarks.peers import free_port
from telegrad import rpc
from telegrad.rpc import rendezvous

SIZES = {"1 element": 1, "1 MB": 1 << 18}
WAYS = ("tcp", "tls")
WINDOW = 0.25


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def join(name: str, rank: int, tls: bool, port: int, key: bytes) -> None:
    torch.set_num_threads(1)
    if tls:
        # It listens as if others were to reach it over a network.
        rendezvous.is_loopback = lambda host: False
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=1 + len(WAYS),
        init_method=f"tcp://127.0.0.1:{port}",
        host="127.0.0.1",
        transports=("tcp",),
        key=key,
    )


def serve(name: str, rank: int, tls: bool, port: int, key: bytes) -> None:
    join(name, rank, tls, port, key)
    rpc.shutdown()


def window(way: str, tensor: torch.Tensor) -> list[float]:
    times = []
    until = time.perf_counter() + WINDOW
    while (start := time.perf_counter()) < until:
        rpc.rpc_sync(way, echo, args=(tensor,))
        times.append(time.perf_counter() - start)
    return times


def measure(rounds: int) -> None:
    print(f"{'echo':12} {'in the clear':>14} {'TLS 1.3':>14} {'ratio':>7}")
    for name, elements in SIZES.items():
        tensor = torch.ones(elements)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            window(way, tensor)
        for number in range(rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                times[way] += window(way, tensor)
        clear, tls = (statistics.median(times[way]) for way in WAYS)
        print(f"{name:12} {clear * 1e6:11.1f} us {tls * 1e6:11.1f} us {tls / clear:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    port, key = free_port(), secrets.token_bytes(32)
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=serve, args=(way, rank, way == "tls", port, key), daemon=True)
        for rank, way in enumerate(WAYS, 1)
    ]
    for worker in workers:
        worker.start()
    join("caller", 0, False, port, key)
    measure(options.rounds)
    rpc.shutdown()
    for worker in workers:
        worker.join(10)


if __name__ == "__main__":
    main()
