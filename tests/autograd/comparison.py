"""One process is the oracle: what workers find must be what it finds.

The gradients, which of them are absent, every call of every hook, and `retain_grad`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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


def _tolerance(program: Program) -> float:
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


def compare_one(
    seed: int,
    features: frozenset[str],
    make_job: MakeJob = harness_job,
    mode: Mode = Mode.SMART,
) -> str:
    """Write, run and compare one program; what it turned out to be, or `Mismatch`."""
    rng = random.Random(seed)
    program = write_program(seed, features)
    oracle = Machine(program, seed)
    try:
        oracle.run(OneProcess())
    except RuntimeError as error:
        raise Skip(str(error)[:40]) from error
    passes = choose_passes(rng, oracle, features)
    expected_error: Exception | None = None
    expected: list[Tensor | None] = []
    try:
        expected = gradients_in_one_process(oracle, passes)
    except Boom as error:
        expected_error = error
    except RuntimeError as error:
        raise Skip(str(error)[:40]) from error
    job = make_job(program.workers, seed)
    machine = Machine(program, seed)
    machine.run(job)
    try:
        for i, (worker, roots) in enumerate(passes):
            tensors = [machine.values[r].sum() for r in roots]
            job.backward(worker, tensors, retain_graph=i + 1 < len(passes), mode=mode)
    except (Boom, RuntimeError) as error:
        outcome = _judge(error, expected_error, mode)
    else:
        if expected_error is not None:
            raise Mismatch("one process fails, the workers did not")
        _compare(oracle, machine, expected, job, strict="undefined" not in features)
        outcome = "equal"
    job.release()
    leftovers = job.leftovers()
    if leftovers:
        raise Mismatch(f"left after the release: {leftovers}")
    return outcome


def _judge(error: Exception, expected: Exception | None, mode: Mode) -> str:
    """An error is right if one process fails too, or if FAST mode was promised too much."""
    if expected is not None and ("boom" in str(error) or "inplace" in str(error)):
        return "failed as it should"
    if mode is Mode.FAST and "never used" in str(error):
        return "named what was not used"
    raise error


def _compare(
    oracle: Machine,
    machine: Machine,
    expected: list[Tensor | None],
    job: Job,
    strict: bool,
) -> None:
    tolerance = _tolerance(oracle.program)
    for i, parameter in enumerate(oracle.program.parameters):
        leaf = machine.parameters[i]
        found = job.gradient(parameter.worker, leaf)
        if not close(expected[i], found, tolerance, strict):
            raise Mismatch(f"gradient of parameter {i} {parameter}: {expected[i]} but {found}")
        if leaf.grad is not None:
            raise Mismatch(f".grad of parameter {i} was touched")
        for other in range(oracle.program.workers):
            if other != parameter.worker and job.gradient(other, leaf) is not None:
                raise Mismatch(f"worker {other} has a gradient of parameter {i}")
    _compare_hooks(oracle, machine, tolerance, strict)
    for number, tensor in oracle.values.items():
        if tensor.requires_grad and not tensor.is_leaf and tensor.retains_grad:
            there = machine.values[number].grad
            if not close(tensor.grad, there, tolerance, strict):
                raise Mismatch(f"retain_grad of value {number}: {tensor.grad} but {there}")


def _compare_hooks(oracle: Machine, machine: Machine, tolerance: float, strict: bool) -> None:
    def calls(of: Machine) -> list[tuple[int, Tensor | None]]:
        found = of.hook_calls
        if not strict:
            found = [(n, g) for n, g in found if g is not None and g.any()]
        return sorted(found, key=lambda c: (c[0], 0.0 if c[1] is None else float(c[1].sum())))

    expected, found = calls(oracle), calls(machine)
    if [number for number, _ in expected] != [number for number, _ in found]:
        raise Mismatch(f"hook calls {[n for n, _ in expected]} but {[n for n, _ in found]}")
    for (number, a), (_, b) in zip(expected, found, strict=True):
        if not close(a, b, tolerance):
            raise Mismatch(f"hook {number} saw {b} instead of {a}")
