"""Calls: telegrad beside stock torch RPC. Run it as `python -m benchmarks.rpc`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from benchmarks.peers import Peer, Samples, compare, sample

SIZES = {"1 element": 1, "64 KB": 1 << 14, "1 MB": 1 << 18, "64 MB": 1 << 24}
BURST = 1000
CLIENTS = 8
CALLS_PER_CLIENT = 100


def nothing() -> None:
    return None


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def cpu_seconds() -> float:
    return time.process_time()


def measure(peer: Peer) -> Samples:
    rpc = peer.rpc
    samples: Samples = {}

    def call() -> None:
        rpc.rpc_sync("worker1", nothing)

    samples["no-op"] = sample(call, 1.0, warm_up=200)
    samples["CPU of a no-op, both ends"] = [_cpu_of(peer, call)]
    for name, elements in SIZES.items():
        tensor = torch.ones(elements)
        warm_up = 20 if elements < 1 << 20 else 5
        samples[f"echo, {name}"] = sample(_echoing(peer, tensor), 1.0, warm_up)

    def burst() -> None:
        futures = [rpc.rpc_async("worker1", nothing) for _ in range(BURST)]
        for future in futures:
            future.wait()

    samples[f"burst of {BURST} async calls"] = sample(burst, 1.0, warm_up=2)
    samples[f"{CLIENTS} threads, time per call"] = many_clients(call)
    return samples


def _echoing(peer: Peer, tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: peer.rpc.rpc_sync("worker1", echo, args=(tensor,))


def _cpu_of(peer: Peer, work: Callable[[], object], count: int = 1000) -> float:
    before = time.process_time() + peer.rpc.rpc_sync("worker1", cpu_seconds)
    for _ in range(count):
        work()
    after = time.process_time() + peer.rpc.rpc_sync("worker1", cpu_seconds)
    return float(after - before) / count


def many_clients(work: Callable[[], object], rounds: int = 5) -> list[float]:
    """Wall time per call while several threads call at once."""
    times = []
    for _ in range(rounds):
        clients = [
            threading.Thread(target=lambda: [work() for _ in range(CALLS_PER_CLIENT)])
            for _ in range(CLIENTS)
        ]
        start = time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        times.append((time.perf_counter() - start) / (CLIENTS * CALLS_PER_CLIENT))
    return times


if __name__ == "__main__":
    compare("benchmarks.rpc", measure)
