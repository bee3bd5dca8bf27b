"""Gradients of gradients: a second loss is made of the gradients of a first one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.autograd.comparison import (
    MakeJob,
    Mismatch,
    Skip,
    choose_passes,
    close,
    harness_job,
)
from tests.autograd.machine import Crossings, Machine, OneProcess
from tests.autograd.program import Operation, Program, Step, write_program


def _twice_differentiable(program: Program) -> Program:
    """The program in double precision and without changes in place."""
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Operation) and step.name in ("inplace", "copyslice"):
            continue
        if isinstance(step, Operation) and step.name == "cast":
            step = replace(step, name="mul")
        steps.append(step)
    parameters = tuple(replace(p, dtype=torch.float64) for p in program.parameters)
    return replace(program, steps=tuple(steps), parameters=parameters)


Gradients = list[Tensor | None]


def _second_order(
    machine: Machine,
    crossings: Crossings,
    seed: int,
    differentiate: Callable[[int, Sequence[Tensor], bool], Gradients],
) -> tuple[Gradients, Gradients | None]:
    """The gradients of a first loss, and those of a loss made of these gradients."""
    rng = random.Random(seed)
    machine.run(crossings)
    worker, roots = choose_passes(rng, machine, frozenset())[0]
    first = differentiate(worker, [machine.values[i].tanh().sum() for i in roots], True)
    where = rng.randrange(machine.program.workers)
    terms: list[Tensor] = []
    for gradient, parameter in zip(first, machine.program.parameters, strict=True):
        if gradient is not None and gradient.requires_grad:
            terms += crossings.cross(parameter.worker, where, [gradient * gradient])
    if rng.random() < 0.5:
        terms += [t.sin() for t in crossings.cross(worker, where, [machine.values[roots[0]]])]
    kept = [None if g is None else g.detach().clone() for g in first]
    if not terms:
        return kept, None
    return kept, differentiate(where, [sum(t.sum() for t in terms)], False)


def compare_second_order(
    seed: int, features: frozenset[str], make_job: MakeJob = harness_job
) -> str:
    """Compare gradients, and gradients of gradients, with those of one process."""
    program = _twice_differentiable(write_program(seed, features))
    oracle = Machine(program, seed)

    def locally(_: int, roots: Sequence[Tensor], create_graph: bool) -> Gradients:
        ones = [torch.ones_like(root) for root in roots]
        leaves = oracle.parameters
        return list(
            torch.autograd.grad(roots, leaves, ones, create_graph=create_graph, allow_unused=True)
        )

    try:
        expected = _second_order(oracle, OneProcess(), seed, locally)
    except RuntimeError as error:
        raise Skip(str(error)[:40]) from error
    job = make_job(program.workers, seed)
    machine = Machine(program, seed)
    seen: dict[Tensor, Tensor] = {}

    def remotely(worker: int, roots: Sequence[Tensor], create_graph: bool) -> Gradients:
        job.backward(worker, roots, create_graph=create_graph)
        total: Gradients = []
        for leaf, p in zip(machine.parameters, program.parameters, strict=True):
            gradient = job.gradient(p.worker, leaf)
            before = seen.get(leaf)
            if gradient is None or gradient is before:
                total.append(None)
            elif before is None:
                total.append(gradient)
                seen[leaf] = gradient
            else:
                total.append(gradient.to_dense() - before.to_dense())
        return total

    found = _second_order(machine, job, seed, remotely)
    for order, (a, b) in enumerate(zip(expected, found, strict=True), start=1):
        if (a is None) != (b is None):
            raise Mismatch(f"only one run has a loss of order {order}")
        for i, (x, y) in enumerate(zip(a or (), b or (), strict=True)):
            if not close(x, y, 1e-7, strict=order == 1):
                raise Mismatch(f"order {order}, parameter {i}: {x} but {y}")
    return "equal" if expected[1] is not None else "equal, no second loss"
