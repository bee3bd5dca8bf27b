"""One process is the oracle: what workers find must be what it finds.

The gradients, which of them are absent, every call of every hook, and `retain_grad`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from telegrad.autograd.messages import Mode
from tests.autograd.harness import Workers
from tests.autograd.machine import Boom, Crossings, Machine, OneProcess, plain
from tests.autograd.program import Operation, Program, write_program


class Job(Crossings, Protocol):
    """Workers that share a context, however they are run."""

    def backward(
        self,
        worker: int,
        roots: Sequence[Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        mode: Mode = Mode.SMART,
    ) -> None: ...

    def gradient(self, worker: int, leaf: Tensor) -> Tensor | None: ...

    def release(self) -> None: ...

    def leftovers(self) -> dict[str, dict[str, int]]:
        """What workers still hold after the release: must be nothing."""
        ...


MakeJob = Callable[[int, int], Job]


def harness_job(workers: int, seed: int) -> Job:
    rng = random.Random(seed)
    return Workers(
        workers,
        seed,
        in_order=rng.random() < 0.6,
        engine_waits=rng.choice([0, 0, 0.5, 0.9]),
    )


class Mismatch(AssertionError):
    """The distributed run differs from the run in one process."""


class Skip(Exception):
    """The drawn program cannot be run even in one process."""


def close(a: Tensor | None, b: Tensor | None, tolerance: float, strict: bool = True) -> bool:
    a, b = plain(a), plain(b)
    if a is None or b is None:
        if strict:
            return a is b
        there = b if a is None else a
        return there is None or not there.any()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def tolerance_of(program: Program) -> float:
    single = any(p.dtype is torch.float32 for p in program.parameters) or any(
        isinstance(step, Operation) and step.name == "cast" for step in program.steps
    )
    return 2e-3 if single else 1e-9


Pass = tuple[int, tuple[int, ...]]


def choose_passes(rng: random.Random, machine: Machine, features: frozenset[str]) -> list[Pass]:
    """Which worker starts a pass, from the sums of which values."""
    home = machine.program.home
    candidates = [i for i in range(len(home)) if machine.values[i].requires_grad]
    if not candidates:
        raise Skip("nothing needs gradient")
    passes: list[Pass] = []
    for _ in range(2 if "passes" in features and rng.random() < 0.5 else 1):
        last = rng.choice(candidates[-4:])
        same = [i for i in candidates if home[i] == home[last]]
        more = [rng.choice(same) for _ in range(rng.choice([0, 0, 1, 2]))]
        passes.append((home[last], (last, *more)))
    return passes


def gradients_in_one_process(machine: Machine, passes: list[Pass]) -> list[Tensor | None]:
    total: list[Tensor | None] = [None] * len(machine.parameters)
    for _, roots in passes:
        torch.autograd.backward([machine.values[i].sum() for i in roots], retain_graph=True)
        for i, parameter in enumerate(machine.parameters):
            found, parameter.grad = parameter.grad, None
            if found is not None:
                known = total[i]
                total[i] = found if known is None else known.to_dense() + found.to_dense()
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What one process makes of a program."""

    program: Program
    oracle: Machine
    passes: list[Pass]
    gradients: list[Tensor | None]
    error: Exception | None


def expectation(seed: int, features: frozenset[str]) -> Expectation:
    program = write_program(seed, features)
    oracle = Machine(program, seed)
    try:
        oracle.run(OneProcess())
        passes = choose_passes(random.Random(seed), oracle, features)
        gradients = gradients_in_one_process(oracle, passes)
    except Boom as error:
        return Expectation(program, oracle, passes, [], error)
    except RuntimeError as error:
        raise Skip(str(error)[:40]) from error
    return Expectation(program, oracle, passes, gradients, None)


def compare_one(
    seed: int,
    features: frozenset[str],
    make_job: MakeJob = harness_job,
    mode: Mode = Mode.SMART,
) -> str:
    """Write, run and compare one program; what it turned out to be, or `Mismatch`."""
    expected = expectation(seed, features)
    program, passes = expected.program, expected.passes
    job = make_job(program.workers, seed)
    machine = Machine(program, seed)
    machine.run(job)
    try:
        for i, (worker, roots) in enumerate(passes):
            tensors = [machine.values[r].sum() for r in roots]
            job.backward(worker, tensors, retain_graph=i + 1 < len(passes), mode=mode)
    except (Boom, RuntimeError) as error:
        outcome = judge(error, expected.error, mode)
    else:
        if expected.error is not None:
            raise Mismatch("one process fails, the workers did not")
        _compare(expected, machine, job, strict="undefined" not in features)
        outcome = "equal"
    job.release()
    leftovers = job.leftovers()
    if leftovers:
        raise Mismatch(f"left after the release: {leftovers}")
    return outcome


def judge(error: Exception, expected: Exception | None, mode: Mode) -> str:
    """An error is right if one process fails too, or if FAST mode was promised too much."""
    if expected is not None and ("boom" in str(error) or "inplace" in str(error)):
        return "failed as it should"
    if mode is Mode.FAST and "never used" in str(error):
        return "named what was not used"
    raise error


def _compare(expected: Expectation, machine: Machine, job: Job, strict: bool) -> None:
    program, tolerance = expected.program, tolerance_of(expected.program)
    for i, parameter in enumerate(program.parameters):
        leaf = machine.parameters[i]
        found = job.gradient(parameter.worker, leaf)
        compare_gradient(expected, i, found, strict)
        if leaf.grad is not None:
            raise Mismatch(f".grad of parameter {i} was touched")
        for other in range(program.workers):
            if other != parameter.worker and job.gradient(other, leaf) is not None:
                raise Mismatch(f"worker {other} has a gradient of parameter {i}")
    compare_hooks(expected.oracle.hook_calls, machine.hook_calls, tolerance, strict)
    compare_retained(
        expected, {n: v.grad for n, v in machine.values.items() if not v.is_leaf}, strict
    )


def compare_gradient(expected: Expectation, i: int, found: Tensor | None, strict: bool) -> None:
    if not close(expected.gradients[i], found, tolerance_of(expected.program), strict):
        parameter = expected.program.parameters[i]
        raise Mismatch(
            f"gradient of parameter {i} {parameter}: {expected.gradients[i]} but {found}"
        )


def compare_retained(expected: Expectation, found: dict[int, Tensor | None], strict: bool) -> None:
    for number, tensor in expected.oracle.values.items():
        if tensor.requires_grad and not tensor.is_leaf and tensor.retains_grad:
            there = found.get(number)
            if not close(tensor.grad, there, tolerance_of(expected.program), strict):
                raise Mismatch(f"retain_grad of value {number}: {tensor.grad} but {there}")


HookCalls = list[tuple[int, Tensor | None]]


def compare_hooks(there: HookCalls, here: HookCalls, tolerance: float, strict: bool) -> None:
    def ordered(calls: HookCalls) -> HookCalls:
        if not strict:
            calls = [(n, g) for n, g in calls if g is not None and g.any()]
        return sorted(calls, key=lambda c: (c[0], 0.0 if c[1] is None else float(c[1].sum())))

    expected, found = ordered(there), ordered(here)
    if [number for number, _ in expected] != [number for number, _ in found]:
        raise Mismatch(f"hook calls {[n for n, _ in expected]} but {[n for n, _ in found]}")
    for (number, a), (_, b) in zip(expected, found, strict=True):
        if not close(a, b, tolerance):
            raise Mismatch(f"hook {number} saw {b} instead of {a}")
