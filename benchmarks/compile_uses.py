"""The uses of remote calls and handles that `make compile-report` tries.

A use is made once for each backend and gives a function of one tensor, which is then run in eager
mode and compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.compile_functions import WEIGHT, halves, layer, positive, several
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import WorkerInfo

Step = Callable[[Tensor], Tensor]
MATRICES = [(4, 3)] * 3

# Called on workers.


def scaled(reference: Any, by: Tensor) -> Tensor:
    return reference.to_here() * by


def nested(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, layer, (x, x)) * 2


def fails(x: Tensor) -> Tensor:
    if type(x) is Tensor:
        raise ArithmeticError("on purpose")
    return x


def referred() -> rpc.RRef[Tensor]:
    return rpc.RRef(torch.full((4, 3), 2.0))


def gradient(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(WEIGHT)


# Uses of which result and gradients are compared.

USES: dict[str, tuple[Callable[[], Step], list[tuple[int, ...]]]] = {}


def use(name: str, shapes: list[tuple[int, ...]] = MATRICES) -> Callable[[Any], None]:
    def add(make: Callable[[], Step]) -> None:
        USES[name] = (make, shapes)

    return add


@use("rpc_sync")
def _() -> Step:
    return lambda x: rpc.rpc_sync("worker1", layer, (x, x)).sum()


@use("rpc_async and wait, two at once")
def _() -> Step:
    def step(x: Tensor) -> Tensor:
        a, b = (rpc.rpc_async(w, layer, (x, x)) for w in ("worker1", "worker2"))
        return (a.wait() * b.wait()).sum()

    return step


@use("nested arguments, several outputs")
def _() -> Step:
    def step(x: Tensor) -> Tensor:
        a, b = rpc.rpc_sync("worker1", several, ({"x": x, "k": [1, "s"]},))
        return (a * b["sum"]).sum()

    return step


@use("dynamic shapes", [(4, 3), (6, 3), (8, 3), (10, 3)])
def _() -> Step:
    return lambda x: rpc.rpc_sync("worker1", halves, (x,)).sum()


@use("sizes that depend on data", [(7,)] * 3)
def _() -> Step:
    return lambda x: rpc.rpc_sync("worker1", positive, (x,)).pow(2).sum()


@use("a call that makes a call")
def _() -> Step:
    return lambda x: rpc.rpc_sync("worker1", nested, ("worker2", x)).sum()


@use("a call without grad")
def _() -> Step:
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = rpc.rpc_sync("worker1", layer, (x, x))
        return (x * seen).sum()

    return step


@use("remote, to_here, RRef as argument")
def _() -> Step:
    def step(x: Tensor) -> Tensor:
        r = rpc.remote("worker1", layer, (x, x))
        return (rpc.rpc_sync("worker1", scaled, (r, x)) * r.to_here()).sum()

    return step


@use("methods of an RRef")
def _() -> Step:
    r = rpc.rpc_sync("worker1", referred)
    return lambda x: (r.rpc_sync().mul(x) + r.rpc_async().add(x).wait()).sum()


@use("RemoteModule")
def _() -> Step:
    module = RemoteModule("worker1", nn.Linear, (3, 3))
    return lambda x: module(x.sin()).sum()


@use("RemoteModule, compiled on its worker")
def _() -> Step:
    module = RemoteModule("worker1", Block, compile={"backend": "aot_eager"})
    return lambda x: module(x.sin()).sum()


# Handles: several in turn, and the first again.

FIRST, SECOND = WorkerInfo("worker1", 1), WorkerInfo("worker2", 2)


class _Known:
    handles: list[Any]


known = _Known()
known.handles = []


def workers() -> list[Any]:
    return [FIRST, SECOND]


def references() -> list[Any]:
    return [rpc.rpc_sync(worker, referred) for worker in ("worker1", "worker2")]


def modules() -> list[Any]:
    return [RemoteModule(w, nn.Linear, (3, 3)) for w in ("worker1", "worker2/cpu")]


def futures() -> list[Any]:
    begin = torch.compile(
        lambda x: rpc.rpc_async("worker1", layer, (x, x)), backend="eager", fullgraph=True
    )
    return [begin(torch.full((4, 3), n)) for n in (1.0, 2.0)]


def _place(handle: Any) -> int:
    return {each: place for place, each in enumerate(known.handles)}[handle]


@dataclass
class Holder:
    """Has a handle as an attribute."""

    kept: Any


HANDLES: dict[str, tuple[Callable[[], list[Any]], Callable[[Tensor, Any], Any]]] = {
    "WorkerInfo: name, id": (workers, lambda x, w: x + w.id + len(w.name)),
    "WorkerInfo: ==, as key, is": (
        workers,
        lambda x, w: x + _place(w) + (w == FIRST) + 2 * (w is FIRST),
    ),
    "WorkerInfo: as target": (workers, lambda x, w: rpc.rpc_sync(w, layer, (x, x)) + w.id),
    "WorkerInfo: attribute, global": (
        workers,
        lambda x, w: x + Holder(w).kept.id + known.handles[0].id,
    ),
    "WorkerInfo: return value": (workers, lambda x, w: (x + w.id, w)),
    "RRef: owner": (references, lambda x, r: x + r.owner().id + r.is_owner()),
    "RRef: ==, as key, is": (
        references,
        lambda x, r: x + _place(r) + (r == known.handles[0]) + 2 * (r is known.handles[0]),
    ),
    "RRef: attribute, global": (
        references,
        lambda x, r: x + Holder(r).kept.owner().id + known.handles[0].owner().id,
    ),
    "RRef: return value": (references, lambda x, r: (x + r.owner().id, r)),
    "RRef: to_here": (references, lambda x, r: x + r.to_here()),
    "RemoteModule: owner, device": (modules, lambda x, m: x + m.owner.id + len(m.remote_device)),
    "RemoteModule: ==, as key, is": (
        modules,
        lambda x, m: x + _place(m) + (m == known.handles[0]) + 2 * (m is known.handles[0]),
    ),
    "RemoteModule: attribute, global": (
        modules,
        lambda x, m: x + Holder(m).kept.owner.id + known.handles[0].owner.id,
    ),
    "RemoteModule: return value": (modules, lambda x, m: (x + m.owner.id, m)),
    "RemoteModule: call": (modules, lambda x, m: m(x)),
    "Future: from another graph": (futures, lambda x, f: x + f.wait() + f.wait()),
}


# Uses that are tried in their own way: each says what became of it.


def try_error(backend: str) -> str:
    fast = torch.compile(
        lambda x: rpc.rpc_sync("worker1", fails, (x,)), backend=backend, fullgraph=True
    )
    try:
        fast(torch.ones(2))
    except ArithmeticError:
        return "works"
    return "no error"


_both_here = threading.Barrier(2)


def meet(x: Tensor) -> Tensor:
    """Returns when two calls of it are under way at the same time."""
    if type(x) is Tensor:
        _both_here.wait(20)
    return x * 2


def try_overlap(backend: str) -> str:
    def step(x: Tensor) -> Tensor:
        a, b = (rpc.rpc_async("worker1", meet, (x + n,)) for n in (0, 1))
        return a.wait() + b.wait()

    fast = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(torch.ones(3)), torch.full((3,), 6.0))
    return "works"


def try_retained(backend: str) -> str:
    """Two passes over one compiled forward."""
    counter = CompileCounterWithBackend(backend)

    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", layer, (x.sin(), x)).pow(2).sum()

    fast = torch.compile(step, backend=counter, fullgraph=True)
    found = []
    for function in (step, fast):
        x = torch.linspace(0, 1, 12).reshape(4, 3).requires_grad_()
        with autograd.context() as context_id:
            loss = function(x)
            autograd.backward(context_id, [loss], retain_graph=True)
            autograd.backward(context_id, [loss])
            found.append(autograd.get_gradients(context_id)[x])
    torch.testing.assert_close(found[0], found[1])
    return f"works, {counter.frame_count} compiled"


def try_context_ids(backend: str) -> str:
    """The id of a context that was entered outside, as an argument; another one in each step."""
    counter = CompileCounterWithBackend(backend)

    def step(x: Tensor, context_id: int) -> Tensor:
        loss = rpc.rpc_sync("worker1", layer, (x, x)).sum()
        autograd.backward(context_id, [loss])
        return loss.detach()

    fast = torch.compile(step, backend=counter, fullgraph=True)
    found = []
    for function in (step, fast, fast, fast, fast):
        x = torch.linspace(0, 1, 12).reshape(4, 3).requires_grad_()
        with autograd.context() as context_id:
            function(x, context_id)
            found.append(autograd.get_gradients(context_id)[x])
    for gradient_of_x in found[1:]:
        torch.testing.assert_close(gradient_of_x, found[0])
    return f"works, {counter.frame_count} compiled"


_compiled_here: list[str] = []


def compilations_here() -> int:
    return len(_compiled_here)


def _counted(backend: str, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    _compiled_here.append(backend)
    return lookup_backend(backend)(graph, inputs)


def counted_eager(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return _counted("eager", graph, inputs)


def counted_aot_eager(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return _counted("aot_eager", graph, inputs)


def counted_inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return _counted("inductor", graph, inputs)


_COUNTED = {"eager": counted_eager, "aot_eager": counted_aot_eager, "inductor": counted_inductor}


class Block(nn.Module):
    """Torch does not compile its own modules by `Module.compile`, only those that users write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x).tanh()
        return found


def try_first_calls(backend: str) -> str:
    """Eight callers at once of a module that is compiled on its worker, and not yet."""
    module = RemoteModule("worker1", Block, compile={"backend": _COUNTED[backend]})
    before = rpc.rpc_sync("worker1", compilations_here)
    x = torch.ones(4, 3)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: module(x), range(8)))
    for result in results:
        torch.testing.assert_close(result, results[0])
    return f"works, {rpc.rpc_sync('worker1', compilations_here) - before} compiled"


def try_two_functions(backend: str) -> str:
    counter = CompileCounterWithBackend(backend)
    make = torch.compile(
        lambda x: rpc.remote("worker1", layer, (x, x)), backend=counter, fullgraph=True
    )
    take = torch.compile(lambda r: r.to_here() * 2, backend=counter, fullgraph=True)
    for n in (1.0, 2.0, 3.0):
        x = torch.full((4, 3), n)
        torch.testing.assert_close(take(make(x)), layer(x, x) * 2)
    return f"works, {counter.frame_count} compiled"


def try_hooks(backend: str) -> str:
    """Module backward hooks and pre-hooks, local and on a RemoteModule."""
    calls: list[int] = []
    local, remote = nn.Linear(3, 3), RemoteModule("worker1", nn.Linear, (3, 3))
    for factor, module in enumerate((local, remote), start=2):

        def hook(_: Any, inputs: Any, outputs: Any, factor: int = factor) -> Any:
            calls.append(factor)
            return tuple(g * factor for g in inputs)

        def pre_hook(_: Any, outputs: Any, factor: int = factor) -> Any:
            calls.append(-factor)
            return tuple(g * factor for g in outputs)

        module.register_full_backward_hook(hook)
        module.register_full_backward_pre_hook(pre_hook)
    counter = CompileCounterWithBackend(backend)

    def step(x: Tensor) -> Tensor:
        return remote(local(x)).pow(2).sum()

    fast = torch.compile(step, backend=counter, fullgraph=True)
    found = []
    x = torch.randn(4, 3, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        for function in (step, fast, fast):
            calls.clear()
            with autograd.context() as context_id:
                autograd.backward(context_id, [function(x)], timeout=60)
                found.append((autograd.get_gradients(context_id)[x], list(calls)))
    for gradient_of_x, order in found[1:]:
        torch.testing.assert_close(gradient_of_x, found[0][0])
        assert order == found[0][1]
    return f"works, {counter.frame_count} compiled"


def train(backend: str | None, steps: int) -> tuple[list[Tensor], int]:
    """Losses and weights after training, and how often a step was compiled."""
    torch.manual_seed(0)
    remote = RemoteModule("worker1", nn.Linear, (3, 3))
    remote.load_state_dict(nn.Linear(3, 3).state_dict())
    local = nn.Linear(3, 3)
    optimizer = DistributedOptimizer(torch.optim.SGD, [remote, local], lr=0.05)

    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = (remote(local(x).relu()) - x).pow(2).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.detach()

    counter = CompileCounterWithBackend(backend or "eager")
    run = step if backend is None else torch.compile(step, backend=counter, fullgraph=True)
    losses = torch.stack([run(torch.randn(5, 3)) for _ in range(steps)])
    return [losses, local.weight.detach(), remote.state_dict()["weight"]], counter.frame_count


def try_training(backend: str) -> str:
    expected, _ = train(None, 100)
    got, compilations = train(backend, 100)
    apart = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
    return f"works, {compilations} compiled" if apart <= 1e-6 else f"differs by {apart:.1e}"


OTHERS: dict[str, Callable[[str], str]] = {
    "an error keeps its type": try_error,
    "two independent calls overlap": try_overlap,
    "retain_graph": try_retained,
    "Context: its id as argument": try_context_ids,
    "RemoteModule: 8 first calls at once, compiled there": try_first_calls,
    "RRef made in one graph, used in another": try_two_functions,
    "module backward hooks and pre-hooks": try_hooks,
    "context, backward, optimizer: 100 steps": try_training,
}
