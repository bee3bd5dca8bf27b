"""Training steps: telegrad beside stock torch RPC. Run it as `python -m benchmarks.train`.

A model is on one worker, or in two halves on two; a step is forward, loss, backward, optimizer.
What it takes longer than the same step in one process is the overhead; its ratio is to stock's.
With two parts the activation goes straight from worker to worker, for both peers.

The step in one process is measured before there is a job. Beside one it would not be the same for
both: idle processes of stock torch RPC keep looking for messages, and a local step that shares the
cores with them takes about a tenth longer. Of a large step that is more than the overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers import Peer, Samples, compare, sample

CLASSES = 10
RATE = 0.01
SECONDS = 2.0


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


_in_one_process: dict[str, float] = {}
"""The median time of a step, by the size of the model."""


def measure_alone() -> Samples:
    """What a step takes in one process."""
    torch.set_num_threads(1)
    samples: Samples = {}
    for name, size in SIZES.items():
        samples[f"{name}, in one process"] = times = sample(_local_step(size), SECONDS)
        _in_one_process[name] = median(times)
    return samples


def measure(peer: Peer) -> Samples:
    torch.set_num_threads(1)
    samples: Samples = {}
    for name, size in SIZES.items():
        for parts in (1, 2):
            case = f"{name}, {parts} remote part" + ("s" if parts > 1 else "")
            samples[case] = times = sample(_remote_step(peer, size, parts), SECONDS)
            samples[f"{case}: overhead"] = [time - _in_one_process[name] for time in times]
    return samples


def _inputs(size: Size) -> tuple[Tensor, Tensor]:
    return torch.randn(size.batch, size.width), torch.randint(CLASSES, (size.batch,))


def _local_step(size: Size) -> Callable[[], None]:
    x, y = _inputs(size)
    model = build_part(size, 1, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _remote_step(peer: Peer, size: Size, parts: int) -> Callable[[], None]:
    x, y = _inputs(size)
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
    compare("benchmarks.train", measure, workers=2, before=measure_alone)
