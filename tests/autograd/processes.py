"""Random programs over real processes: each value lives in the process of its worker.

The test's process conducts: it has each step done where it belongs, by calls made in one context.
A crossing is a call from worker to worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import api
from telegrad.autograd.messages import Mode
from tests.autograd.comparison import (
    Mismatch,
    compare_gradient,
    compare_hooks,
    compare_retained,
    expectation,
    judge,
    tolerance_of,
)
from tests.autograd.machine import Boom, Machine, OneProcess, plain
from tests.autograd.program import Cross, Program, Step
from tests.rpc.fleet import Nursery, join, serve_store

_machines: dict[int, Machine] = {}


# On the workers.


def prepare(program: Program, seed: int) -> None:
    _machines[seed] = Machine(program, seed)


def perform(seed: int, step: Step, names: list[str]) -> None:
    machine = _machines[seed]
    if not isinstance(step, Cross):
        machine.do(step, OneProcess())
        return
    tensors = [machine.values[i] for i in step.values]
    if step.late:
        rpc.rpc_async(names[step.target], receive, args=(seed, (), tensors))
    else:
        rpc.rpc_sync(names[step.target], receive, args=(seed, step.out, tensors))


def receive(seed: int, out: tuple[int, ...], tensors: list[Tensor]) -> None:
    if out:
        _machines[seed].values.update(zip(out, tensors, strict=True))


def differentiate(
    context_id: int, seed: int, roots: tuple[int, ...], retain_graph: bool, mode: str
) -> None:
    tensors = [_machines[seed].values[i].sum() for i in roots]
    api.backward(context_id, tensors, retain_graph=retain_graph, mode=mode)


def collect(context_id: int, seed: int) -> dict[str, Any]:
    machine = _machines[seed]
    gradients = api.get_gradients(context_id)
    return {
        "gradients": {
            i: plain(gradients[p]) for i, p in enumerate(machine.parameters) if p in gradients
        },
        "touched": [i for i, p in enumerate(machine.parameters) if p.grad is not None],
        "hook_calls": machine.hook_calls,
        "retained": {n: plain(v.grad) for n, v in machine.values.items() if not v.is_leaf},
    }


def forget(seed: int) -> None:
    _machines.pop(seed, None)


def leftovers() -> dict[str, int]:
    return api.autograd_of().counts()


# In the process that conducts.

NAMES = ("main", "one", "two", "three")


@contextmanager
def four_workers() -> Iterator[list[str]]:
    """A job of four workers; this process is the first of them."""
    nursery = Nursery()
    store = serve_store()
    processes = [nursery.start() for _ in NAMES[1:]]
    for rank, process in enumerate(processes, start=1):
        process.begin(_serve, NAMES[rank], rank, store.port)
    join(NAMES[0], 0, len(NAMES), store.port)
    yield list(NAMES)
    rpc.shutdown(timeout=20)
    errors = [process.end() for process in processes]
    nursery.close()
    assert not [text for text in errors if "Traceback" in text]


def _serve(name: str, rank: int, port: int) -> None:
    join(name, rank, len(NAMES), port)
    rpc.shutdown()


def compare_over_processes(
    seed: int, features: frozenset[str], names: list[str], mode: Mode = Mode.SMART
) -> str:
    """Run one program on the workers of these names and compare it with one process."""
    expected = expectation(seed, features)
    program = expected.program
    names = names[: program.workers]
    for name in names:
        rpc.rpc_sync(name, prepare, args=(program, seed))
    with api.context() as context_id:
        for step in program.steps:
            rpc.rpc_sync(names[step.worker], perform, args=(seed, step, names))
        try:
            for i, (worker, roots) in enumerate(expected.passes):
                retain = i + 1 < len(expected.passes)
                rpc.rpc_sync(
                    names[worker], differentiate, args=(context_id, seed, roots, retain, mode.value)
                )
        except (Boom, RuntimeError) as error:
            outcome = judge(error, expected.error, mode)
        else:
            if expected.error is not None:
                raise Mismatch("one process fails, the workers did not")
            with torch.no_grad():
                found = [rpc.rpc_sync(n, collect, args=(context_id, seed)) for n in names]
            _compare(expected, found, strict="undefined" not in features)
            outcome = "equal"
    for name in names:
        rpc.rpc_sync(name, forget, args=(seed,))
    return outcome


def _compare(expected: Any, found: list[dict[str, Any]], strict: bool) -> None:
    program: Program = expected.program
    for i, parameter in enumerate(program.parameters):
        for worker, there in enumerate(found):
            if worker == parameter.worker:
                compare_gradient(expected, i, there["gradients"].get(i), strict)
            elif i in there["gradients"]:
                raise Mismatch(f"worker {worker} has a gradient of parameter {i}")
            if i in there["touched"]:
                raise Mismatch(f".grad of parameter {i} was touched")
    calls = [call for there in found for call in there["hook_calls"]]
    compare_hooks(expected.oracle.hook_calls, calls, tolerance_of(program), strict)
    retained = {n: g for there in found for n, g in there["retained"].items()}
    compare_retained(expected, retained, strict)
