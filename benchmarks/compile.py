"""`make bench-compile`: a step with about 50 small local operations around two remote calls,
backward and optimizer, eager and compiled, by turns in one run.

What is compared is the *overhead of the driver*: the time of a step less the time that the workers
and the wire need for it. The latter is measured beside it, as the row "workers and wire": the same
tensors go to the same workers by plain calls, outside of any context, and the workers do the same
arithmetic (forward, gradients, update) without autograd of ours. What is left is what the driver
spends on local operations, autograd, contexts and the making of calls.

"CPU" is the CPU time of the driver's process in a step, with its waiting left out.

`overlapped` has both calls under way at once: with workers that take 20 ms for a forward, a serial
step needs twice that, an overlapped one once.
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
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import rpc_async, rpc_sync

ROUNDS = 100
WORKERS = ("worker1", "worker2")
SLOW = 0.02


def block(x: Tensor, weights: Tensor) -> Tensor:
    """Four operations for each weight."""
    for weight in weights:
        x = (x * weight).tanh() + x.sigmoid() * 0.1
    return x


# On the workers, for the row "workers and wire".

_weight = torch.randn(64, 64) * 0.1
_bias = torch.zeros(64)


def raw_forward(x: Tensor) -> Tensor:
    return torch.addmm(_bias, x, _weight)


def raw_backward(gradient: Tensor) -> Tensor:
    gradient.sum(0)
    gradient.t().mm(gradient)
    return gradient.mm(_weight)


def raw_step() -> None:
    with torch.no_grad():
        _weight.add_(_weight, alpha=-1e-9)
        _bias.add_(_bias, alpha=-1e-9)


def raw(x: Tensor) -> None:
    for worker in WORKERS:
        rpc_sync(worker, raw_forward, (x,))
    for worker in reversed(WORKERS):
        rpc_sync(worker, raw_backward, (x,))
    for future in [rpc_async(worker, raw_step) for worker in WORKERS]:
        future.wait()


class Slow(nn.Module):
    """Takes its time, as a large model does."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            time.sleep(SLOW)
        return x * 2


Run = Callable[[], object]


def steps() -> dict[str, Run]:
    first, second = (RemoteModule(worker, nn.Linear, (64, 64)) for worker in WORKERS)
    weights = nn.Parameter(torch.randn(12, 64) * 0.1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [first, second, weights], lr=1e-6)
    x = torch.randn(32, 64)

    def serial(x: Tensor) -> Tensor:
        return second(first(block(x, weights[:6])))

    def overlapped(x: Tensor) -> Tensor:
        h = block(x, weights[:6])
        a, b = first.forward_async(h), second.forward_async(h)
        return a.wait() + b.wait()

    def step(middle: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with autograd.context() as context_id:
                loss = block(middle(x), weights[6:]).pow(2).mean()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            return loss.detach()

        return run

    found: dict[str, Run] = {"workers and wire": lambda: raw(x)}
    for name, middle in (("serial", serial), ("overlapped", overlapped)):
        eager = step(middle)
        fast = compiled(eager)
        found[f"{name}, eager"] = lambda eager=eager: eager(x)
        found[f"{name}, compiled"] = lambda fast=fast: fast(x)
    return found


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    options = {"reorder_for_peak_memory": False}
    return torch.compile(function, fullgraph=True, backend="inductor", options=options)


def slow_calls() -> dict[str, Run]:
    first, second = (RemoteModule(worker, Slow) for worker in WORKERS)
    x = torch.randn(4, 4)

    def serial(x: Tensor) -> Tensor:
        return second(first(x))

    def overlapped(x: Tensor) -> Tensor:
        a, b = first.forward_async(x), second.forward_async(x)
        return a.wait() + b.wait()

    found: dict[str, Run] = {}
    for name, function in (("serial", serial), ("overlapped", overlapped)):
        fast = compiled(function)
        found[f"slow workers, {name}, compiled"] = lambda fast=fast: fast(x)
    return found


def measure(variants: dict[str, Run], rounds: int) -> dict[str, tuple[float, float, float]]:
    """p10 and median of the time, median of the CPU time, in milliseconds, by turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for run in variants.values():
        for _ in range(5):
            run()
    for _ in range(rounds):
        for name, run in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    found = {}
    for name, pairs in taken.items():
        walls, cpus = numpy.array(pairs).T * 1e3
        found[name] = (
            float(numpy.percentile(walls, 10)),
            float(numpy.median(walls)),
            float(numpy.median(cpus)),
        )
    return found


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    found = measure(steps(), rounds)
    bare = found["workers and wire"]
    print(f"{'milliseconds':34}{'p10':>8}{'median':>8}{'CPU':>8}{'overhead p10':>14}{'median':>8}")
    for name, (p10, median, cpu) in found.items():
        over = f"{p10 - bare[0]:14.2f}{median - bare[1]:8.2f}"
        print(f"{name:34}{p10:8.2f}{median:8.2f}{cpu:8.2f}{over}")
    for kind in ("serial", "overlapped"):
        eager, fast = found[f"{kind}, eager"], found[f"{kind}, compiled"]
        ratio = (fast[0] - bare[0]) / (eager[0] - bare[0])
        print(
            f"{kind}: overhead of the compiled driver is {ratio:.2f} of the eager one (p10), ",
            end="",
        )
        print(f"CPU {fast[2] / eager[2]:.2f}")
    for name, (p10, median, cpu) in measure(slow_calls(), max(rounds // 5, 5)).items():
        print(f"{name:34}{p10:8.2f}{median:8.2f}{cpu:8.2f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    telegrad.run(main, workers=2, timeout=120)
