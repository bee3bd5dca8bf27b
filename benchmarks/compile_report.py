"""`make compile-report`: what compiles as one graph, by backend, beside stock torch.

Every use runs in eager mode and compiled with `fullgraph=True`, where a graph break is an error;
results and gradients on all workers are compared. "n compiled" counts compilations over several
runs: with other contexts, sizes or objects each time. Uses of process groups, meshes, placements
and DTensor are in compile_objects.py, the others in compile_uses.py. `--write` puts the table into
the docs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

BACKENDS = ("eager", "aot_eager", "inductor")
NAME, CELL = 54, 24
NOTHING = "not tried"
DOCUMENT = Path(__file__).parents[1] / "docs" / "compile.md"
BEGIN, END = "<!-- compile-report -->", "<!-- end -->"


def show(name: str, cells: list[str], stock: str) -> None:
    print(f"{name:{NAME}}" + "".join(f"{c[: CELL - 2]:{CELL}}" for c in cells) + stock[:60])
    sys.stdout.flush()


# With telegrad.


def differentiated(step: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    from benchmarks.compile_uses import gradient
    from telegrad import autograd, rpc

    x = x.clone().requires_grad_()
    with autograd.context() as context_id:
        loss = step(x)
        autograd.backward(context_id, [loss], timeout=60)
        there = [rpc.rpc_sync(w, gradient, (context_id,)) for w in ("worker1", "worker2")]
        return [loss.detach(), autograd.get_gradients(context_id)[x], *there]


def try_use(make: Callable[[], Any], shapes: list[tuple[int, ...]], backend: str) -> str:
    step = make()
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(step, backend=counter, fullgraph=True)
    for shape in shapes:
        x = torch.randn(shape)
        for a, b in zip(differentiated(step, x), differentiated(fast, x), strict=True):
            if a is not None:
                torch.testing.assert_close(a, b)
    return f"works, {counter.frame_count} compiled"


def _parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def try_handles(make: Callable[[], list[Any]], use: Callable[..., Tensor], backend: str) -> str:
    from benchmarks.compile_uses import known

    known.handles = make()
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(use, backend=counter, fullgraph=True)
    for handle in (*known.handles, known.handles[0]):
        x = torch.randn(4, 3)
        for got, expected in zip(_parts(fast(x, handle)), _parts(use(x, handle)), strict=True):
            if isinstance(expected, Tensor):
                torch.testing.assert_close(got, expected)
            elif got is not expected:
                return f"gives {got!r}, not {expected!r}"
    return f"works, {counter.frame_count} compiled"


def attempt(backend: str, use: Callable[..., str], *arguments: Any) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        return use(*arguments, backend)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def report_calls(backends: list[str]) -> list[tuple[str, list[str], str]]:
    import telegrad.compile  # noqa: F401 - installs the guards
    from benchmarks.compile_uses import HANDLES, OTHERS, USES

    stock = stock_calls()
    rows: list[tuple[str, Callable[..., str], tuple[Any, ...]]] = [
        *[(name, try_use, made) for name, made in USES.items()],
        *[(name, try_handles, made) for name, made in HANDLES.items()],
        *[(name, use, ()) for name, use in OTHERS.items()],
    ]
    found = []
    for name, use, arguments in rows:
        cells = [attempt(backend, use, *arguments) for backend in backends]
        found.append((name, cells, stock.get(name, NOTHING)))
        show(*found[-1])
    return found


# Stock torch.


class Beside:
    """A program that runs beside this one, and prints lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def lines(self) -> list[Any]:
        said, _ = self._process.communicate(timeout=600)
        return [json.loads(line) for line in said.splitlines() if line.startswith("[")]


def stock_calls() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        return dict(Beside("benchmarks.compile_report", "--stock", f"{directory}/store").lines())


def try_stock_calls(store: str) -> None:
    """The same uses with `torch.distributed.rpc`, in a process that calls itself."""
    import torch.distributed.rpc as stock_rpc
    from torch.distributed import autograd as stock_autograd
    from torch.distributed.nn.api.remote_module import RemoteModule

    from benchmarks.compile_functions import halves, layer, positive, several

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    options = stock_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    stock_rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    me = stock_rpc.get_worker_info()
    rref = stock_rpc.RRef(torch.ones(4, 3))

    module = RemoteModule("me/cpu", torch.nn.Linear, (3, 3))  # type: ignore[no-untyped-call]

    def call(x: Tensor) -> Tensor:
        found: Tensor = stock_rpc.rpc_sync("me", layer, (x, x))
        return found

    def without_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            return call(x)

    def two(x: Tensor) -> Tensor:
        a, b = (stock_rpc.rpc_async("me", layer, (x, x)) for _ in range(2))
        found: Tensor = a.wait() + b.wait()
        return found

    def whole(x: Tensor) -> Tensor:
        with stock_autograd.context() as context_id:
            loss = stock_rpc.rpc_sync("me", layer, (x, x)).sum()
            stock_autograd.backward(context_id, [loss])
        return loss.detach()

    uses: dict[str, Callable[[Tensor], Any]] = {
        "rpc_sync": lambda x: stock_rpc.rpc_sync("me", layer, (x, x)).sum(),
        "rpc_async and wait, two at once": two,
        "two independent calls overlap": two,
        "a call without grad": without_grad,
        "a call that makes a call": call,
        "an error keeps its type": call,
        "retain_graph": call,
        "WorkerInfo: as target": lambda x: stock_rpc.rpc_sync(me, layer, (x, x)),
        "WorkerInfo: attribute, global": lambda x: x + me.id,
        "WorkerInfo: return value": lambda x: (x + 1, me),
        "RRef: attribute, global": lambda x: x + rref.owner().id,
        "RRef: return value": lambda x: (x + 1, rref),
        "RRef made in one graph, used in another": lambda x: stock_rpc.remote("me", layer, (x, x)),
        "RemoteModule": lambda x: module(x),
        "RemoteModule: call": lambda x: module(x),
        "RemoteModule: owner, device": lambda x: x + module.get_module_rref().owner().id,
        "RemoteModule: return value": lambda x: (x + 1, module),
        "module backward hooks and pre-hooks": lambda x: module(x),
        "Context: its id as argument": whole,
        "nested arguments, several outputs": lambda x: stock_rpc.rpc_sync(
            "me", several, ({"x": x, "k": [1, "s"]},)
        )[0],
        "dynamic shapes": lambda x: stock_rpc.rpc_sync("me", halves, (x,)).sum(),
        "sizes that depend on data": lambda x: stock_rpc.rpc_sync("me", positive, (x,)).sum(),
        "remote, to_here, RRef as argument": lambda x: stock_rpc.remote("me", layer, (x, x)),
        "methods of an RRef": lambda x: rref.rpc_sync().sin(),
        "WorkerInfo: name, id": lambda x: x + me.id + len(me.name),
        "WorkerInfo: ==, as key, is": lambda x: x + {me: 1}[me] + (me == me),
        "RRef: owner": lambda x: x + rref.owner().id,
        "RRef: ==, as key, is": lambda x: x + {rref: 1}[rref],
        "RRef: to_here": lambda x: x + rref.to_here(),
        "context, backward, optimizer: 100 steps": whole,
    }
    for name, use in uses.items():
        torch._dynamo.reset()
        try:
            torch.compile(use, backend="eager", fullgraph=True)(torch.randn(4, 3))
            outcome = "works"
        except Exception as error:
            outcome = " ".join(str(error).split())
        print(json.dumps([name, outcome]), flush=True)
    stock_rpc.shutdown(graceful=False)


def write(rows: list[tuple[str, list[str], str]], header: tuple[str, list[str], str]) -> None:
    """Put the table into the documentation."""
    said = DOCUMENT.read_text()
    lines = []
    for name, cells, stock in (header, *rows):
        short = [re.sub(r"^works, (\d+) compiled$", r"\1", cell) for cell in (*cells, stock)]
        lines.append("| " + " | ".join((name, *[_cell(text) for text in short])) + " |")
    lines.insert(1, "|" + "---|" * (len(header[1]) + 2))
    start, end = said.index(BEGIN) + len(BEGIN), said.index(END)
    DOCUMENT.write_text(said[:start] + "\n" + "\n".join(lines) + "\n" + said[end:])


def _cell(text: str) -> str:
    """What stock torch says against a use is long, and begins with what it is."""
    text = text.split(" Explanation:")[0].replace("|", "/")
    return text if len(text) <= 60 else text[:57] + "..."


def main(arguments: list[str]) -> None:
    import telegrad

    began = time.monotonic()
    backends = [b for b in BACKENDS if b in arguments] or list(BACKENDS)
    # What needs no workers runs beside the rest, on another core.
    objects = Beside("benchmarks.compile_objects", "telegrad", *backends)
    stock = Beside("benchmarks.compile_objects", "stock", "aot_eager")
    show("use", backends, "stock torch")
    rows: list[tuple[str, list[str], str]] = telegrad.run(lambda: report_calls(backends), workers=2)
    of_stock = dict(stock.lines())
    for name, cells in objects.lines():
        rows.append((name, cells, of_stock.get(name, [NOTHING])[0]))
        show(*rows[-1])
    failed = [name for name, cells, _ in rows if not all(c.startswith("works") for c in cells)]
    print(f"{len(rows)} uses, {len(failed)} do not work: {time.monotonic() - began:.0f} s")
    if "--write" in arguments:
        write(rows, ("use", backends, "stock torch"))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if sys.argv[1:2] == ["--stock"]:
        try_stock_calls(sys.argv[2])
    else:
        main(sys.argv[1:])
