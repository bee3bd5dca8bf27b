"""Distributed backward beside stock torch: `python -m benchmarks.autograd`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch

from benchmarks.peers import Peer, Samples, compare, sample, sample_in_turn

CHAIN = 1000
CALLS = 32
CONTEXTS = 8

LOCAL = f"local backward, {CHAIN} nodes"
LONG = f"{CHAIN} nodes and one hop"
HOP_BESIDE = "one hop beside them"

WEIGHT = torch.eye(8).requires_grad_()


def step(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def chain(x: torch.Tensor, length: int = CHAIN) -> torch.Tensor:
    for _ in range(length):
        x = x * 1.0001
    return x


def measure(peer: Peer) -> Samples:
    samples: Samples = {}
    x = torch.ones(8, 8, requires_grad=True)
    modes = ("smart", "fast") if peer.name == "telegrad" else ("smart",)

    def empty() -> None:
        with peer.autograd.context():
            pass

    samples["empty context"] = sample(empty, 0.5)
    cases: tuple[tuple[str, int, bool], ...] = (
        ("1 hop", 1, True),
        ("10 hops", 10, True),
        (f"{CALLS} calls in one pass", CALLS, False),
    )
    for case, count, serial in cases:
        samples |= sample_in_turn(
            {
                case if mode == "smart" else f"{case}, {mode}": _hops(
                    peer, x, count, mode, serial=serial
                )
                for mode in modes
            },
            1.0,
        )
    samples |= sample_in_turn(
        {
            LOCAL: lambda: torch.autograd.grad(chain(x).sum(), x),
            HOP_BESIDE: _hops(peer, x, 1, "smart"),
            LONG: _long_chain(peer, x),
        },
        1.0,
    )
    samples[f"{CONTEXTS} contexts at once"] = _many_contexts(_hops(peer, x, 1, "smart"))
    return samples


def derived(samples: Samples) -> dict[str, float]:
    """What the local graph costs beyond the hop, and SMART beyond FAST, as ratios of medians."""
    middle = {case: median(times) for case, times in samples.items()}
    beyond = middle[LONG] - middle[HOP_BESIDE]
    ratios = {f"{CHAIN} nodes without the hop, to local": beyond / middle[LOCAL]}
    for case in middle:
        if f"{case}, fast" in middle:
            ratios[f"{case}, smart to fast"] = middle[case] / middle[f"{case}, fast"]
    return ratios


def _backward(peer: Peer, context: int, loss: torch.Tensor, mode: str) -> None:
    if peer.name == "telegrad":
        peer.autograd.backward(context, [loss], mode=mode)
    else:
        peer.autograd.backward(context, [loss])


def _hops(
    peer: Peer, x: torch.Tensor, count: int, mode: str, *, serial: bool = True
) -> Callable[[], None]:
    def run() -> None:
        context: AbstractContextManager[Any] = peer.autograd.context()
        with context as number:
            if serial:
                y = x
                for _ in range(count):
                    y = peer.rpc.rpc_sync("worker1", step, args=(y,))
            else:
                futures = [peer.rpc.rpc_async("worker1", step, args=(x,)) for _ in range(count)]
                y = torch.stack([future.wait() for future in futures])
            _backward(peer, number, y.sum(), mode)

    return run


def _long_chain(peer: Peer, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with peer.autograd.context() as number:
            y = chain(peer.rpc.rpc_sync("worker1", step, args=(x,)))
            _backward(peer, number, y.sum(), "smart")

    return run


def _many_contexts(work: Callable[[], None], each: int = 20) -> list[float]:
    """Wall time per context while several threads each run theirs."""
    times = []
    for _ in range(5):
        threads = [
            threading.Thread(target=lambda: [work() for _ in range(each)]) for _ in range(CONTEXTS)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append((time.perf_counter() - start) / (each * CONTEXTS))
    return times


if __name__ == "__main__":
    compare("benchmarks.autograd", measure, derived=derived)
