"""`make bench-compile`: a step with about 50 small local operations around two remote calls,
backward and optimizer, eager and compiled, by turns in one run.

What is compared is the *overhead of the driver*, in two ways.

The time of a step beyond what its remote calls take by themselves. That is the row "remote calls
alone": the same context, two calls, backward pass and optimizer step in eager mode, without the
operations around them. What is left is what the driver spends on its own operations and their
gradients, and what it costs or saves to make the calls from a graph instead.

"CPU": the CPU time of the driver's process in a step, all of it but the moments in which it looks
for an answer before it sleeps. Nothing of it is the workers'. The row "workers and wire" has plain
calls with the same tensors only, outside of any context, where the workers do the same arithmetic
by hand: what lies beyond it is what contexts, gradients, the optimizer and the operations cost the
driver. This is the stricter way: most of that is the same work in both kinds of steps.

Steps run in blocks, by turns: a program runs the same step again and again.

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
from telegrad.wire.stream import PlainStream

ROUNDS = 300
BLOCK, WARM = 20, 5
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

    def alone(x: Tensor) -> Tensor:
        return second(first(x * weights[0]))

    def alone_overlapped(x: Tensor) -> Tensor:
        h = x * weights[0]
        a, b = first.forward_async(h), second.forward_async(h)
        return a.wait() + b.wait()

    def remote_calls(middle: Callable[[Tensor], Tensor]) -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [middle(x).sum()])
            optimizer.step(context_id)

    def step(middle: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with autograd.context() as context_id:
                loss = block(middle(x), weights[6:]).pow(2).mean()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            return loss.detach()

        return run

    found: dict[str, Run] = {"workers and wire": lambda: raw(x)}
    for name, middle, bare in (
        ("serial", serial, alone),
        ("overlapped", overlapped, alone_overlapped),
    ):
        eager = step(middle)
        fast = compiled(eager)
        found[f"{name}, remote calls alone"] = lambda bare=bare: remote_calls(bare)
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


_looking = [0.0]


def watch_for_looking() -> None:
    """Count the CPU time in which threads of this process read, or look whether they can."""
    recv_into = PlainStream.recv_into

    def counted(stream: PlainStream, view: memoryview) -> int:
        began = time.thread_time()
        try:
            return recv_into(stream, view)
        finally:
            _looking[0] += time.thread_time() - began

    PlainStream.recv_into = counted  # type: ignore[method-assign]


def measure(variants: dict[str, Run], rounds: int) -> dict[str, tuple[float, float, float]]:
    """p10 and median of the time, median of the CPU time, in milliseconds."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for run in variants.values():
        for _ in range(5):
            run()
    for _ in range(max(rounds // BLOCK, 1)):
        for name, run in variants.items():
            for step in range(WARM + BLOCK):
                _looking[0] = 0.0
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                cpu = time.process_time() - cpu - _looking[0]
                if step >= WARM:
                    taken[name].append((time.perf_counter() - wall, cpu))
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
    watch_for_looking()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    found = measure(steps(), rounds)
    print(f"{'milliseconds':34}{'p10':>8}{'median':>8}{'CPU':>8}")
    for name, (p10, median, cpu) in found.items():
        print(f"{name:34}{p10:8.2f}{median:8.2f}{cpu:8.2f}")
    for kind in ("serial", "overlapped"):
        eager, fast = found[f"{kind}, eager"], found[f"{kind}, compiled"]
        for base in (f"{kind}, remote calls alone", "workers and wire"):
            ratios = [(f - b) / (e - b) for e, f, b in zip(eager, fast, found[base], strict=True)]
            print(
                f"{kind}: beyond {base.removeprefix(kind + ', ')!r} the compiled driver takes "
                f"{ratios[0]:.2f} (p10), {ratios[1]:.2f} (median) of the eager one's time, "
                f"{ratios[2]:.2f} of its CPU"
            )
    for name, (p10, median, cpu) in measure(slow_calls(), BLOCK).items():
        print(f"{name:34}{p10:8.2f}{median:8.2f}{cpu:8.2f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    telegrad.run(main, workers=2, timeout=120)
