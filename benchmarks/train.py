"""Training steps: telegrad beside stock torch RPC. Run it as `python -m benchmarks.train`.

A model is on one worker, or in two halves on two; a step is forward, loss, backward, optimizer.
What it takes longer than the same step without workers is the overhead; its ratio is to stock's.
With two parts the activation goes straight from worker to worker, for both peers.

The step without workers is made by the very processes that hold the parts, in turn with the other.
The cores of a machine that is shared are not equally fast at any moment: a local step in the
driver's process would be made on another core, and its difference to a large step says more about
the two cores than about calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers import Peer, Samples, compare, paced

CLASSES = 10
RATE = 0.01
SECONDS = 2.0
WARM_UP = 20


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    batch: int


SIZES = {"small": Size(width=64, layers=4, batch=32), "medium": Size(width=512, layers=6, batch=64)}


def build_part(size: Size, parts: int, number: int) -> nn.Sequential:
    """One of the consecutive parts of a model; the last one ends in the classes."""
    layers: list[nn.Module] = []
    for _ in range(size.layers // parts):
        layers += [nn.Linear(size.width, size.width), nn.ReLU()]
    if number == parts - 1:
        layers.append(nn.Linear(size.width, CLASSES))
    return nn.Sequential(*layers)


def measure(peer: Peer) -> Samples:
    torch.set_num_threads(1)
    samples: Samples = {}
    for name, size in SIZES.items():
        x, y = torch.randn(size.batch, size.width), torch.randint(CLASSES, (size.batch,))
        for parts in (1, 2):
            spread = _remote_step(peer, size, parts, x, y)
            pairs = _in_turn(partial(_time_alone, peer, name, parts), partial(_timed, spread))
            case = f"{name}, {parts} remote part" + ("s" if parts > 1 else "")
            samples.setdefault(f"{name}, in one process", []).extend(a for a, _ in pairs)
            samples[case] = [b for _, b in pairs]
            samples[f"{case}: overhead"] = [b - a for a, b in pairs]
    return samples


def _in_turn(one: Callable[[], float], other: Callable[[], float]) -> list[tuple[float, float]]:
    """Times of both, each pair of them taken at the same moment of a noisy machine."""
    for _ in range(WARM_UP):
        one()
        other()
    pairs: list[tuple[float, float]] = []
    until = time.perf_counter() + paced(SECONDS)
    while time.perf_counter() < until or len(pairs) < 5:
        pairs.append((one(), other()))
    return pairs


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _time_alone(peer: Peer, size: str, parts: int) -> float:
    """How long the processes that hold the parts take for a step of the whole model, each alone."""
    workers = [f"worker{number + 1}" for number in range(parts)]
    return mean(peer.rpc.rpc_sync(worker, time_local_step, args=(size,)) for worker in workers)


def time_local_step(size: str) -> float:
    return _timed(_local_step(size))


@cache
def _local_step(name: str) -> Callable[[], None]:
    size = SIZES[name]
    x, y = torch.randn(size.batch, size.width), torch.randint(CLASSES, (size.batch,))
    model = build_part(size, 1, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _remote_step(peer: Peer, size: Size, parts: int, x: Tensor, y: Tensor) -> Callable[[], None]:
    make = _telegrad_model if peer.name == "telegrad" else _stock_model
    forward, optimizer = make(size, parts)

    def step() -> None:
        with peer.autograd.context() as context:
            peer.autograd.backward(context, [cross_entropy(forward(x), y)])
            optimizer.step(context)

    return step


Model = tuple[Callable[[Tensor], Tensor], Any]
"""How to call it, and its optimizer."""


def _telegrad_model(size: Size, parts: int) -> Model:
    from telegrad.nn import RemoteModule
    from telegrad.optim import DistributedOptimizer

    modules = [
        RemoteModule(f"worker{number + 1}", build_part, (size, parts, number))
        for number in range(parts)
    ]

    def forward(x: Any) -> Tensor:
        for module in modules[:-1]:
            x = module.lazy(x)
        output: Tensor = modules[-1](x)
        return output

    return forward, DistributedOptimizer(torch.optim.SGD, modules, lr=RATE)


class StockPart:
    """As the tutorials of torch RPC write it: inputs may be references."""

    def __init__(self, size: Size, parts: int, number: int) -> None:
        self._layers = build_part(size, parts, number)

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            x = x.to_here()
        output: Tensor = self._layers(x)
        return output

    def parameters(self) -> list[Any]:
        from torch.distributed.rpc import RRef

        return [RRef(parameter) for parameter in self._layers.parameters()]


def _stock_model(size: Size, parts: int) -> Model:
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer

    models = [
        rpc.remote(f"worker{number + 1}", StockPart, args=(size, parts, number))
        for number in range(parts)
    ]

    def forward(x: Any) -> Tensor:
        for model in models[:-1]:
            x = model.remote().forward(x)
        output: Tensor = models[-1].rpc_sync().forward(x)
        return output

    parameters = [rref for model in models for rref in model.rpc_sync().parameters()]
    return forward, DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)


if __name__ == "__main__":
    compare("benchmarks.train", measure, workers=2)
