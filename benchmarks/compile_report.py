"""`make compile-report`: what compiles as one graph, by backend, beside stock torch RPC.

Each row runs a use in eager mode and compiled with `fullgraph=True` (a graph break is an error),
compares results and gradients on all workers, and counts compilations over three runs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

BACKENDS = ("eager", "aot_eager", "inductor")
WEIGHT = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3))


def layer(a: Tensor, b: Tensor) -> Tensor:
    return (a * b) @ WEIGHT


def several(d: dict[str, Any]) -> Any:
    return d["x"] * 2, {"sum": d["x"].sum(0)}


def halves(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2] * 2


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


def scaled(reference: Any, by: Tensor) -> Tensor:
    return reference.to_here() * by


def gradient(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(WEIGHT)


Step = Callable[..., Tensor]
ROWS: dict[str, Callable[[], tuple[Step, list[tuple[int, ...]]]]] = {}


def row(name: str) -> Callable[[Callable[[], Any]], None]:
    def add(make: Callable[[], Any]) -> None:
        ROWS[name] = make

    return add


@row("rpc_sync")
def _() -> Any:
    return lambda x: rpc.rpc_sync("worker1", layer, (x, x)).sum(), [(4, 3)] * 3


@row("rpc_async + wait, two at once")
def _() -> Any:
    def step(x: Tensor) -> Tensor:
        a, b = (rpc.rpc_async(w, layer, (x, x)) for w in ("worker1", "worker2"))
        return (a.wait() * b.wait()).sum()

    return step, [(4, 3)] * 3


@row("nested arguments, several outputs")
def _() -> Any:
    def step(x: Tensor) -> Tensor:
        a, b = rpc.rpc_sync("worker1", several, ({"x": x, "k": [1, "s"]},))
        return (a * b["sum"]).sum()

    return step, [(4, 3)] * 3


@row("dynamic shapes")
def _() -> Any:
    return lambda x: rpc.rpc_sync("worker1", halves, (x,)).sum(), [(4, 3), (6, 3), (8, 3), (10, 3)]


@row("sizes that depend on data")
def _() -> Any:
    return lambda x: rpc.rpc_sync("worker1", positive, (x,)).pow(2).sum(), [(7,)] * 3


@row("remote, to_here, RRef as argument")
def _() -> Any:
    def step(x: Tensor) -> Tensor:
        r = rpc.remote("worker1", layer, (x, x))
        return (rpc.rpc_sync("worker1", scaled, (r, x)) * r.to_here()).sum()

    return step, [(4, 3)] * 3


@row("RemoteModule")
def _() -> Any:
    module = RemoteModule("worker1", nn.Linear, (3, 3))
    return lambda x: module(x.sin()).sum(), [(4, 3)] * 3


def differentiated(step: Step, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    with autograd.context() as context_id:
        loss = step(x)
        autograd.backward(context_id, [loss], timeout=30)
        there = [rpc.rpc_sync(w, gradient, (context_id,)) for w in ("worker1", "worker2")]
        return [loss.detach(), autograd.get_gradients(context_id)[x], *there]


def try_row(make: Callable[[], Any], backend: str) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    step, shapes = make()
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(step, backend=counter, fullgraph=True)
    try:
        for shape in shapes:
            x = torch.randn(shape)
            for a, b in zip(differentiated(step, x), differentiated(fast, x), strict=True):
                if a is not None:
                    torch.testing.assert_close(a, b)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:40]}"
    return f"works, {counter.frame_count} compiled"


def try_whole_step(backend: str) -> str:
    results = []
    compilations = 0
    for fast in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        remote = RemoteModule("worker1", nn.Linear, (3, 3))
        remote.load_state_dict(nn.Linear(3, 3).state_dict())
        local = nn.Linear(3, 3)
        optimizer = DistributedOptimizer(torch.optim.SGD, [remote, local], lr=0.05)

        def step(x: Tensor, remote: Any = remote, local: Any = local, o: Any = optimizer) -> Tensor:
            with autograd.context() as context_id:
                loss = (remote(local(x).relu()) - x).pow(2).mean()
                autograd.backward(context_id, [loss])
                o.step(context_id)
            return loss.detach()

        counter = CompileCounterWithBackend(backend)
        run = torch.compile(step, backend=counter, fullgraph=True) if fast else step
        losses = torch.stack([run(torch.randn(5, 3)) for _ in range(10)])
        compilations = counter.frame_count
        results.append([losses, local.weight.detach(), remote.state_dict()["weight"]])
    try:
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    except AssertionError as error:
        return f"differs: {str(error).splitlines()[0][:40]}"
    return f"works, {compilations} compiled"


def stock() -> None:
    """The same uses with `torch.distributed.rpc`, in a process that calls itself."""
    import torch.distributed.rpc as stock_rpc
    from torch.distributed import autograd as stock_autograd

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    options = stock_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[2]}")
    stock_rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    def whole(x: Tensor) -> Tensor:
        with stock_autograd.context() as context_id:
            loss = stock_rpc.rpc_sync("me", layer, (x, x)).sum()
            stock_autograd.backward(context_id, [loss])
        return loss.detach()

    uses: list[Step] = [
        lambda x: stock_rpc.rpc_sync("me", layer, (x, x)).sum(),
        lambda x: stock_rpc.rpc_async("me", layer, (x, x)).wait().sum(),
        lambda x: stock_rpc.rpc_sync("me", several, ({"x": x, "k": [1, "s"]},))[0].sum(),
        lambda x: stock_rpc.rpc_sync("me", halves, (x,)).sum(),
        lambda x: stock_rpc.rpc_sync("me", positive, (x,)).sum(),
        lambda x: stock_rpc.remote("me", layer, (x, x)).to_here().sum(),
        lambda x: stock_rpc.RRef(x).rpc_sync().sin().sum(),
        whole,
    ]
    for use in uses:
        torch._dynamo.reset()
        try:
            torch.compile(use, backend="eager", fullgraph=True)(torch.randn(4, 3))
            print("works", flush=True)
        except Exception as error:
            print(str(error).splitlines()[0][:60], flush=True)
    stock_rpc.shutdown(graceful=False)


def stock_results() -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--stock", f"{directory}/store"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    expected = len(ROWS) + 1
    return lines if len(lines) == expected else ["could not be tried"] * expected


def main() -> None:
    others = iter(stock_results())
    backends = [b for b in BACKENDS if b in (sys.argv[1:] or BACKENDS)]
    print(f"{'use':44}" + "".join(f"{b:22}" for b in backends) + "stock torch RPC")
    for name, make in ROWS.items():
        cells = [try_row(make, backend) for backend in backends]
        print(f"{name:44}" + "".join(f"{c:22}" for c in cells) + next(others), flush=True)
    name = "context, backward, optimizer in one graph"
    cells = [try_whole_step(backend) for backend in backends]
    print(f"{name:44}" + "".join(f"{c:22}" for c in cells) + next(others), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if sys.argv[1:2] == ["--stock"]:
        stock()
    else:
        telegrad.run(main, workers=2)
