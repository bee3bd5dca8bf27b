"""Training steps: telegrad beside stock torch RPC. Run it as `python -m benchmarks.train`.

A model is on one worker, or in two halves on two; a step is forward, loss, backward, optimizer.
What it takes longer than the same step in one process is the overhead; its ratio is to stock's.
With two parts the activation goes straight from worker to worker, for both peers.

telegrad has two ways to say it. *Call by call* is how stock's users write it: each part is called,
then `backward`, then `step`. *As one* the parts are a `RemoteSequential`, and the step is a part of
the backward pass. Stock has the first way only; both are compared with that.

The step in one process, stock's and telegrad's take turns several times a second (`slices.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import slices
from benchmarks.peers import PEERS, Peer, Samples, run_peer, table

PROGRAM = "benchmarks.train"
LOCAL = "local"
PARTS = (1, 2)
CLASSES = 10
RATE = 0.01


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    batch: int
    waits: float = 0.0
    """Seconds for which each part does nothing, in both directions."""


SIZES = {"small": Size(width=64, layers=4, batch=32), "medium": Size(width=512, layers=6, batch=64)}


def build_part(size: Size, parts: int, number: int) -> nn.Sequential:
    """One of the consecutive parts of a model; the last one ends in the classes."""
    layers: list[nn.Module] = []
    for _ in range(size.layers // parts):
        layers += [nn.Linear(size.width, size.width), nn.ReLU()]
    if number == parts - 1:
        layers.append(nn.Linear(size.width, CLASSES))
    if size.waits:
        layers.append(Wait(size.waits))
    return nn.Sequential(*layers)


class Wait(nn.Module):
    """Looks at the clock for so long, and again in the backward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Waited.apply(x, self._seconds)
        return waited


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        look_at_the_clock(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        look_at_the_clock(ctx.seconds)
        return gradient, None


def look_at_the_clock(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def local_case(size: str) -> str:
    return f"{size}, in one process"


def remote_case(size: str, parts: int) -> str:
    return f"{size}, {parts} remote part" + ("s" if parts > 1 else "")


def as_one(case: str) -> str:
    """The same steps, said in telegrad's own way."""
    return f"{case}, as one"


def serve_local() -> None:
    torch.set_num_threads(1)
    slices.serve({local_case(name): local_step(size) for name, size in SIZES.items()})


def serve_remote(peer: Peer) -> Samples:
    torch.set_num_threads(1)
    steps: dict[str, Callable[[], None]] = {}
    for name, size in SIZES.items():
        for parts in PARTS:
            case = remote_case(name, parts)
            steps[case] = remote_step(peer, size, parts)
            if peer.name == "telegrad":
                steps[as_one(case)] = step_as_one(peer, size, parts)
    slices.serve(steps)
    return {}


def measure(rounds: int, seconds: float) -> dict[str, Samples]:
    """By peer, the median steps of all slices, and what steps take longer than in one process."""
    samples: dict[str, Samples] = {name: {} for name in PEERS}
    for share in slices.shares(rounds):
        local = slices.Sliced(PROGRAM, LOCAL)
        peers = [slices.Sliced(PROGRAM, name, stops=name == "stock") for name in PEERS]
        with slices.started([local, *peers]):
            for number in share:
                print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for size in SIZES:
                    for parts in PARTS:
                        _measure_case(local, peers, size, parts, seconds, samples)
                        peers.reverse()
    for found in samples.values():
        for size in SIZES:
            for parts in PARTS:
                alone = lower_quartile(found[local_case(size)])
                for case in (remote_case(size, parts), as_one(remote_case(size, parts))):
                    found[f"{case}: overhead"] = [lower_quartile(found[case]) - alone]
    return samples


def lower_quartile(times: list[float]) -> float:
    return quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def _measure_case(
    local: slices.Sliced,
    peers: list[slices.Sliced],
    size: str,
    parts: int,
    seconds: float,
    samples: dict[str, Samples],
) -> None:
    """One slice of the step in one process, and one of each peer."""
    alone, case = local_case(size), remote_case(size, parts)
    in_one_process = median(local.run(alone, seconds))
    for peer in peers:
        found = samples[peer.name]
        found.setdefault(alone, []).append(in_one_process)
        step = median(peer.run(case, seconds))
        found.setdefault(case, []).append(step)
        if peer.name == "telegrad":
            step = median(peer.run(as_one(case), seconds))
        found.setdefault(as_one(case), []).append(step)


def make_inputs(size: Size) -> tuple[Tensor, Tensor]:
    return torch.randn(size.batch, size.width), torch.randint(CLASSES, (size.batch,))


def local_step(size: Size) -> Callable[[], None]:
    x, y = make_inputs(size)
    model = build_part(size, 1, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def remote_step(peer: Peer, size: Size, parts: int) -> Callable[[], None]:
    x, y = make_inputs(size)
    make = _telegrad_model if peer.name == "telegrad" else _stock_model
    forward, optimizer = make(size, parts)

    def step() -> None:
        with peer.autograd.context() as context:
            peer.autograd.backward(context, [cross_entropy(forward(x), y)])
            optimizer.step(context)

    return step


def step_as_one(peer: Peer, size: Size, parts: int) -> Callable[[], None]:
    from telegrad.nn import RemoteSequential
    from telegrad.optim import DistributedOptimizer

    x, y = make_inputs(size)
    model = RemoteSequential(*_telegrad_parts(size, parts))
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=RATE)

    def step() -> None:
        with peer.autograd.context() as context:
            optimizer.backward_and_step(context, [cross_entropy(model(x), y)])

    return step


Model = tuple[Callable[[Tensor], Tensor], Any]
"""How to call it, and its optimizer."""


def _telegrad_parts(size: Size, parts: int) -> list[Any]:
    from telegrad.nn import RemoteModule

    return [
        RemoteModule(f"worker{number + 1}", build_part, (size, parts, number))
        for number in range(parts)
    ]


def _telegrad_model(size: Size, parts: int) -> Model:
    from telegrad.optim import DistributedOptimizer

    modules = _telegrad_parts(size, parts)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=f"python -m {PROGRAM}")
    parser.add_argument("--rounds", type=int, default=16, help="how often each peer has its turns")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a turn takes")
    parser.add_argument("--json", action="store_true", help="print all times instead of a table")
    parser.add_argument("--serve", choices=(LOCAL, *PEERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == LOCAL:
        serve_local()
    elif arguments.serve:
        run_peer(arguments.serve, serve_remote, workers=max(PARTS))
    else:
        samples = measure(arguments.rounds, arguments.seconds)
        print(json.dumps(samples) if arguments.json else "\n".join(table(samples)))


if __name__ == "__main__":
    main()
