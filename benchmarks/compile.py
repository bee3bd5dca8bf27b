"""A step of about 50 small local operations around two remote calls: eager and compiled, by turns.

Printed are p10 and median in milliseconds. `driver` is a step without what it spends on the two
remote calls and their backward, which are timed alone beside it.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable

import numpy
import torch
from torch import Tensor, nn

import telegrad
from telegrad import autograd
from telegrad.nn import RemoteModule

ROUNDS = 100


def block(x: Tensor, weights: Tensor) -> Tensor:
    for weight in weights:
        x = (x * weight).tanh() + x.sigmoid() * 0.1
    return x


def main() -> None:
    torch.set_num_threads(1)
    first, second = (RemoteModule(w, nn.Linear, (64, 64)) for w in ("worker1", "worker2"))
    weights = nn.Parameter(torch.randn(12, 64) * 0.1)
    x = torch.randn(32, 64)

    def forward(x: Tensor) -> Tensor:
        h = block(x, weights[:6])
        return block(second(first(h)), weights[6:]).pow(2).mean()

    def eager() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [forward(x)])

    def whole(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = forward(x)
            autograd.backward(context_id, [loss])
        return loss.detach()

    fast = torch.compile(
        whole, fullgraph=True, backend="inductor", options={"reorder_for_peak_memory": False}
    )

    def calls_only() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [second(first(x)).sum()])

    variants: dict[str, Callable[[], object]] = {
        "remote calls and backward alone": calls_only,
        "eager step": eager,
        "compiled step": lambda: fast(x),
    }
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        for _ in range(5):
            run()
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    base = numpy.array(times["remote calls and backward alone"])
    for name, taken in times.items():
        p10, median = numpy.percentile(taken, 10), numpy.median(taken)
        driver = median - numpy.median(base)
        print(f"{name:34} p10 {p10:7.2f}  median {median:7.2f}  driver {driver:7.2f} ms")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    telegrad.run(main, workers=2)
