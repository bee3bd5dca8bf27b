"""Bytes per worker: activations between remote modules need not pass through the driver.

An encoder on worker1 makes a wide activation of a small input, a decoder on worker2 makes a number
of it. One training step is made in two ways: `decoder(encoder(x))` brings the activation to the
driver and sends it on; `decoder(encoder.lazy(x))` leaves it to worker2 to fetch it from worker1,
and the gradient goes back the way the activation came. Every worker counts what it sends to whom.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from twins import count

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule

WORKERS = ("main", "worker1", "worker2")
INPUTS = 8

Traffic = dict[tuple[str, str], int]
"""Bytes by who sent them, and to whom."""


def sent_by_me() -> dict[str, int]:
    """On each worker: the bytes that it has sent to each other."""
    return {peer: sent for peer, (sent, _) in rpc.debug_info()["bytes"].items()}


def traffic() -> Traffic:
    counts = {worker: rpc.rpc_sync(worker, sent_by_me) for worker in WORKERS}
    pairs = [(a, b) for a in WORKERS for b in WORKERS if a != b]
    return {(a, b): counts[a].get(b, 0) for a, b in pairs}


def traffic_of(step: Callable[[], object]) -> Traffic:
    before = traffic()
    step()
    return {pair: count - before[pair] for pair, count in traffic().items()}


def measure(rows: int, width: int) -> tuple[Traffic, Traffic]:
    encoder = RemoteModule("worker1", nn.Linear, (INPUTS, width))
    decoder = RemoteModule("worker2", nn.Linear, (width, 1))
    x = torch.randn(rows, INPUTS)

    def step(activation: Callable[[Tensor], Any]) -> None:
        with autograd.context() as context:
            autograd.backward(context, [decoder(activation(x)).sum()])

    step(encoder)  # links are opened, and greet each other, when they are first used
    step(encoder.lazy)
    return traffic_of(lambda: step(encoder)), traffic_of(lambda: step(encoder.lazy))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Who carries the bytes of an activation.")
    parser.add_argument("--rows", type=count, default=64, help="of a batch (64)")
    parser.add_argument("--width", type=count, default=4096, help="of the activation (4096)")
    chosen = parser.parse_args(argv)
    through, past = telegrad.run(
        lambda: measure(chosen.rows, chosen.width), workers=["worker1", "worker2"]
    )
    activation = chosen.rows * chosen.width * 4
    print(f"The activation has {activation:,} bytes, and so has its gradient.\n")
    print(f"{'bytes from':12}{'to':12}{'encoder(x)':>16}{'encoder.lazy(x)':>18}")
    for sender, receiver in through:
        pair = (sender, receiver)
        print(f"{sender:12}{receiver:12}{through[pair]:16,}{past[pair]:18,}")
    at_main = sum(count for pair, count in past.items() if "main" in pair)
    print(f"\nLazily, {at_main:,} bytes pass through the driver.")
    return 0 if at_main < activation else 1


if __name__ == "__main__":
    sys.exit(main())
