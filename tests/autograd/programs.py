"""Random distributed programs, and the two ways to run them: in one process, and on workers.

A program is a list of steps over numbered values, each of which lives on one worker. One process
is the oracle: a crossing is a clone there, and torch's own backward gives the gradients. On
workers, crossings are messages and the gradients come from a distributed pass. Both must agree in
every gradient, in which gradients are absent, in every call of every hook, and in `retain_grad`.

    python -m tests.autograd.programs --count 10000 --features hook,custom,module,passes
    python -m tests.autograd.programs --seed 4711 --features hook

A failing program prints its seed and features, which is all it takes to run it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from telegrad.autograd.messages import Mode
from tests.autograd.harness import Workers, clone_all

FEATURES = frozenset(
    ["hook", "post", "custom", "undefined", "fail"]
    + ["checkpoint", "module", "sparse", "late", "passes"]
)


class Boom(Exception):
    """Raised by a backward formula on purpose."""


# Steps.


@dataclass(frozen=True, slots=True)
class Parameter:
    worker: int
    kind: str
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True, slots=True)
class UseParameter:
    worker: int
    parameter: int
    out: int


@dataclass(frozen=True, slots=True)
class Constant:
    worker: int
    seed: int
    out: int


@dataclass(frozen=True, slots=True)
class Cross:
    """Tensors go to another worker; late ones arrive at any time and are not used there."""

    worker: int
    target: int
    values: tuple[int, ...]
    out: tuple[int, ...]
    late: bool = False


@dataclass(frozen=True, slots=True)
class Hook:
    worker: int
    value: int
    number: int
    effect: str


@dataclass(frozen=True, slots=True)
class LeafHook:
    worker: int
    parameter: int
    number: int
    after_accumulation: bool


@dataclass(frozen=True, slots=True)
class RetainGrad:
    worker: int
    value: int


@dataclass(frozen=True, slots=True)
class Operation:
    worker: int
    name: str
    a: int
    b: int
    parameter: int | None
    out: tuple[int, ...]


Step = UseParameter | Constant | Cross | Hook | LeafHook | RetainGrad | Operation


@dataclass(frozen=True, slots=True)
class Program:
    workers: int
    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    home: tuple[int, ...]
    """The worker of each value."""


# Making programs.

_COMMON = ["add", "mul", "mm", "sin", "bias", "gated", "residual", "slice", "unbind"] + [
    "inplace",
    "copyslice",
    "cast",
    "detached",
    "view",
]
_BY_FEATURE = {
    "custom": "two_outputs",
    "undefined": "undefined",
    "fail": "failing",
    "checkpoint": "checkpoint",
    "module": "module",
    "sparse": "embedding",
}
_SHAPES = {"matrix": (3, 3), "vector": (3,), "embedding": (5, 3)}


class _Author:
    def __init__(self, rng: random.Random, features: frozenset[str]) -> None:
        self.rng = rng
        self.features = features
        self.workers = rng.choice([1, 2, 2, 3, 4])
        self.parameters: list[Parameter] = []
        self.steps: list[Step] = []
        self.home: list[int] = []
        self.hooks = 0
        self.operations = list(_COMMON)
        for feature in sorted(features & _BY_FEATURE.keys()):
            self.operations += [_BY_FEATURE[feature]] * (1 if feature == "fail" else 2)

    def write(self) -> Program:
        self._parameters()
        for _ in range(self.rng.randint(4, 45)):
            self._step()
        return Program(self.workers, tuple(self.parameters), tuple(self.steps), tuple(self.home))

    def _value(self, worker: int) -> int:
        self.home.append(worker)
        return len(self.home) - 1

    def _parameters(self) -> None:
        rng = self.rng
        for worker in range(self.workers):
            for _ in range(rng.randint(0, 3)):
                dtype = rng.choice([torch.float64, torch.float64, torch.float32])
                self.parameters.append(Parameter(worker, "matrix", dtype))
            if rng.random() < 0.6:
                self.parameters.append(Parameter(worker, "vector"))
            if "sparse" in self.features and rng.random() < 0.5:
                self.parameters.append(Parameter(worker, "embedding"))
        if not any(p.kind == "matrix" for p in self.parameters):
            self.parameters.append(Parameter(0, "matrix"))
        for number, parameter in enumerate(self.parameters):
            if parameter.kind == "matrix":
                self.steps.append(
                    UseParameter(parameter.worker, number, self._value(parameter.worker))
                )
        for worker in range(self.workers):
            self.steps.append(Constant(worker, worker, self._value(worker)))

    def _step(self) -> None:
        rng = self.rng
        worker = rng.randrange(self.workers)
        mine = [i for i, home in enumerate(self.home) if home == worker]
        recent = mine[-6:] if rng.random() < 0.6 else mine
        draw = rng.random()
        if draw < 0.3:
            self._cross(worker, [rng.choice(recent) for _ in range(rng.choice([1, 1, 1, 2, 3]))])
        elif draw < 0.36 and "late" in self.features:
            values = tuple(rng.choice(recent) for _ in range(rng.choice([1, 2])))
            self.steps.append(Cross(worker, rng.randrange(self.workers), values, (), late=True))
        elif draw < 0.44 and "hook" in self.features:
            self._hook(worker, rng.choice(recent), draw)
        elif draw < 0.46 and "post" in self.features:
            self._leaf_hook(after_accumulation=True)
        else:
            self._operation(worker, mine, recent)

    def _cross(self, worker: int, values: list[int]) -> None:
        for _ in range(2 if self.rng.random() < 0.15 else 1):
            target = self.rng.randrange(self.workers)
            out = tuple(self._value(target) for _ in values)
            self.steps.append(Cross(worker, target, tuple(values), out))

    def _hook(self, worker: int, value: int, draw: float) -> None:
        if draw < 0.39:
            effect = self.rng.choice(["clamp", "look", "double"])
            self.steps.append(Hook(worker, value, self._hook_number(), effect))
        elif draw < 0.42:
            self.steps.append(RetainGrad(worker, value))
        else:
            self._leaf_hook(after_accumulation=False)

    def _leaf_hook(self, after_accumulation: bool) -> None:
        number = self.rng.randrange(len(self.parameters))
        home = self.parameters[number].worker
        self.steps.append(LeafHook(home, number, self._hook_number(), after_accumulation))

    def _hook_number(self) -> int:
        self.hooks += 1
        return self.hooks

    def _operation(self, worker: int, mine: list[int], recent: list[int]) -> None:
        name = self.rng.choice(self.operations)
        a, b = self.rng.choice(recent), self.rng.choice(mine)
        wanted = {"bias": "vector", "embedding": "embedding"}.get(name)
        parameter = next(
            (i for i, p in enumerate(self.parameters) if p.worker == worker and p.kind == wanted),
            None,
        )
        if wanted is not None and parameter is None:
            name = "mul"
        outputs = {"two_outputs": 2, "inplace": 0, "copyslice": 0}.get(name, 1)
        out = tuple(self._value(worker) for _ in range(outputs))
        self.steps.append(Operation(worker, name, a, b, parameter, out))


def write_program(seed: int, features: frozenset[str]) -> Program:
    return _Author(random.Random(seed), features).write()


# Running programs.


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, g1: Tensor, g2: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return (g1 * b + g2).to(a.dtype), (g1 * a + g2).to(b.dtype)


class Undefined(torch.autograd.Function):
    """Its second input gets no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise Boom("boom")


class Product(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b + a


def _checkpointed(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).tanh() * a.sin() + b


class Crossings(Protocol):
    """How tensors get from one worker to another."""

    def cross(self, source: int, target: int, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def cross_late(self, source: int, target: int, tensors: Sequence[Tensor]) -> None: ...


class OneProcess:
    """No workers at all: a crossing is a clone."""

    def cross(self, source: int, target: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        return clone_all(tensors)

    def cross_late(self, source: int, target: int, tensors: Sequence[Tensor]) -> None:
        return None


class Machine:
    """Holds values and parameters, and carries out steps on them."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        self.values: dict[int, Tensor] = {}
        self.hook_calls: list[tuple[int, Tensor | None]] = []
        self._modules: list[Product] = []
        generator = torch.Generator().manual_seed(seed)
        self.parameters: list[Tensor] = []
        for p in program.parameters:
            drawn = torch.randn(_SHAPES[p.kind], generator=generator, dtype=torch.float64)
            self.parameters.append(drawn.to(p.dtype).requires_grad_())

    def run(self, crossings: Crossings) -> None:
        for step in self.program.steps:
            self.do(step, crossings)

    def do(self, step: Step, crossings: Crossings) -> None:
        match step:
            case UseParameter(_, parameter, out):
                self.values[out] = self.parameters[parameter]
            case Constant(_, seed, out):
                generator = torch.Generator().manual_seed(seed)
                self.values[out] = torch.randn(3, 3, generator=generator, dtype=torch.float64)
            case Cross(source, target, values, out, late):
                tensors = [self.values[i] for i in values]
                if late:
                    crossings.cross_late(source, target, tensors)
                else:
                    arrived = crossings.cross(source, target, tensors)
                    self.values.update(zip(out, arrived, strict=True))
            case Hook(_, value, number, effect):
                if self.values[value].requires_grad:
                    self.values[value].register_hook(self._hook(number, effect))
            case LeafHook(_, parameter, number, after_accumulation):
                self._hook_leaf(self.parameters[parameter], number, after_accumulation)
            case RetainGrad(_, value):
                tensor = self.values[value]
                # Torch itself crashes on retain_grad of a later output that is then changed.
                if tensor.requires_grad and tensor.output_nr == 0:
                    tensor.retain_grad()
            case Operation():
                self._operate(step)

    def _hook(self, number: int, effect: str) -> Callable[[Tensor | None], Tensor | None]:
        def hook(gradient: Tensor | None) -> Tensor | None:
            self.hook_calls.append((number, _plain(gradient)))
            if gradient is None or effect == "look":
                return None
            return gradient.clamp(-1, 1) * 1.5 if effect == "clamp" else gradient * 2

        return hook

    def _hook_leaf(self, leaf: Tensor, number: int, after_accumulation: bool) -> None:
        def before(gradient: Tensor | None) -> Tensor | None:
            self.hook_calls.append((number, _plain(gradient)))
            return None if gradient is None else gradient * 0.5

        def after(leaf: Tensor) -> None:
            self.hook_calls.append((number, _plain(leaf.grad)))

        if after_accumulation:
            leaf.register_post_accumulate_grad_hook(after)
        else:
            leaf.register_hook(before)

    def _operate(self, step: Operation) -> None:
        a, b = self.values[step.a], self.values[step.b]
        if step.name in ("inplace", "copyslice"):
            if not (a.requires_grad and a.is_leaf):
                self._change(step, a, b)
            return
        results = self._compute(step, a, b)
        self.values.update(zip(step.out, results, strict=True))

    def _change(self, step: Operation, a: Tensor, b: Tensor) -> None:
        if step.name == "copyslice":
            a[1].copy_(b[0])
        elif step.b % 2:
            a.mul_(0.5)
        else:
            a.add_(b)

    def _compute(self, step: Operation, a: Tensor, b: Tensor) -> Sequence[Tensor]:
        parameter = None if step.parameter is None else self.parameters[step.parameter]
        match step.name:
            case "add":
                return [a + b]
            case "mul":
                return [a * b]
            case "mm":
                return [(a.double() @ b.double()).tanh()]
            case "sin":
                return [a.sin()]
            case "bias":
                return [a + parameter]
            case "gated":
                return [a * torch.sigmoid(a)]
            case "residual":
                return [a + (b * a).cos()]
            case "slice":
                return [torch.cat([a[:1], b[1:]])]
            case "unbind":
                x, y, z = a.unbind(0)
                return [torch.stack([x * y, z, x])]
            case "cast":
                return [a.float() * b.float()]
            case "detached":
                return [a.detach() * b]
            case "view":
                return [a.t() + a.view(9).view(3, 3) if a.is_contiguous() else a.t() * 1]
            case "two_outputs":
                return TwoOutputs.apply(a, b)
            case "undefined":
                return [Undefined.apply(a, b)]
            case "failing":
                return [Failing.apply(a)]
            case "checkpoint":
                return [checkpoint(_checkpointed, a, b, use_reentrant=False)]
            case "module":
                return [self._module()(a, b)]
            case "embedding":
                rows = torch.tensor([0, 2, 2])
                return [a + torch.nn.functional.embedding(rows, parameter, sparse=True)]
        raise AssertionError(step.name)

    def _module(self) -> Product:
        module = Product()
        module.register_full_backward_hook(
            lambda _, gi, go: tuple(None if g is None else g.clamp(-2, 2) for g in gi)
        )
        self._modules.append(module)
        return module


def _plain(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().clone()


# Comparing.


class Mismatch(AssertionError):
    """The distributed run differs from the run in one process."""


class Skip(Exception):
    """The drawn program cannot be run even in one process."""


def _close(a: Tensor | None, b: Tensor | None, tolerance: float, strict: bool = True) -> bool:
    a, b = _plain(a), _plain(b)
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


def compare_one(seed: int, features: frozenset[str], mode: Mode = Mode.SMART) -> str:
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
    workers = Workers(
        program.workers,
        seed,
        in_order=rng.random() < 0.6,
        engine_waits=rng.choice([0, 0, 0.5, 0.9]),
    )
    machine = Machine(program, seed)
    machine.run(workers)
    try:
        for i, (worker, roots) in enumerate(passes):
            tensors = [machine.values[r].sum() for r in roots]
            workers.backward(worker, tensors, retain_graph=i + 1 < len(passes), mode=mode)
    except RuntimeError as error:
        if expected_error is None or not ("boom" in str(error) or "inplace" in str(error)):
            raise
        workers.release()
        _check_clean(workers)
        return "failed as it should"
    except Boom:
        if expected_error is None:
            raise
        workers.release()
        _check_clean(workers)
        return "failed as it should"
    if expected_error is not None:
        raise Mismatch("one process fails, the workers did not")
    _compare(oracle, machine, expected, workers, strict="undefined" not in features)
    workers.release()
    _check_clean(workers)
    STATISTICS.update(workers.network.sent)
    return "equal"


STATISTICS: Counter[str] = Counter()


def _check_clean(workers: Workers) -> None:
    for node in workers.nodes:
        counts = node.autograd.counts()
        if any(counts.values()):
            raise Mismatch(f"{node.info.name} still has {counts}")


def _compare(
    oracle: Machine,
    machine: Machine,
    expected: list[Tensor | None],
    workers: Workers,
    strict: bool,
) -> None:
    tolerance = _tolerance(oracle.program)
    for i, parameter in enumerate(oracle.program.parameters):
        leaf = machine.parameters[i]
        found = workers.gradient(parameter.worker, leaf)
        if not _close(expected[i], found, tolerance, strict):
            raise Mismatch(f"gradient of parameter {i} {parameter}: {expected[i]} but {found}")
        if leaf.grad is not None:
            raise Mismatch(f".grad of parameter {i} was touched")
        for other in range(oracle.program.workers):
            if other != parameter.worker and workers.gradient(other, leaf) is not None:
                raise Mismatch(f"worker {other} has a gradient of parameter {i}")
    _compare_hooks(oracle, machine, tolerance, strict)
    for number, tensor in oracle.values.items():
        if tensor.requires_grad and not tensor.is_leaf and tensor.retains_grad:
            there = machine.values[number].grad
            if not _close(tensor.grad, there, tolerance, strict):
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
        if not _close(a, b, tolerance):
            raise Mismatch(f"hook {number} saw {b} instead of {a}")


# Gradients of gradients.


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


def compare_second_order(seed: int, features: frozenset[str]) -> str:
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
    rng = random.Random(seed)
    workers = Workers(
        program.workers,
        seed,
        in_order=rng.random() < 0.6,
        engine_waits=rng.choice([0, 0.5, 0.9]),
    )
    machine = Machine(program, seed)
    seen: dict[Tensor, Tensor] = {}

    def remotely(worker: int, roots: Sequence[Tensor], create_graph: bool) -> Gradients:
        workers.backward(worker, roots, create_graph=create_graph)
        total: Gradients = []
        for leaf, p in zip(machine.parameters, program.parameters, strict=True):
            gradient = workers.gradient(p.worker, leaf)
            before = seen.get(leaf)
            if gradient is None or gradient is before:
                total.append(None)
            elif before is None:
                total.append(gradient)
                seen[leaf] = gradient
            else:
                total.append(gradient.to_dense() - before.to_dense())
        return total

    found = _second_order(machine, workers, seed, remotely)
    for order, (a, b) in enumerate(zip(expected, found, strict=True), start=1):
        if (a is None) != (b is None):
            raise Mismatch(f"only one run has a loss of order {order}")
        for i, (x, y) in enumerate(zip(a or (), b or (), strict=True)):
            if not _close(x, y, 1e-7, strict=order == 1):
                raise Mismatch(f"order {order}, parameter {i}: {x} but {y}")
    return "equal" if expected[1] is not None else "equal, no second loss"


# The long run.


Compare = Callable[[int, frozenset[str]], str]


def outcomes(
    seeds: Sequence[int], features: frozenset[str], compare: Compare = compare_one
) -> Iterator[tuple[int, str]]:
    """For each seed what became of its program; anything that starts with FAILED is a bug."""
    for seed in seeds:
        try:
            yield seed, compare(seed, features)
        except Skip as skip:
            yield seed, f"skipped: {skip}"
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-4:])
            yield seed, f"FAILED {type(error).__name__}: {str(error)[:300]}\n{text}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--features", default="hook,custom,module,passes")
    parser.add_argument("--second-order", action="store_true", help="gradients of gradients")
    given = parser.parse_args(arguments)
    features = frozenset(given.features.split(",")) - {""}
    unknown = features - FEATURES
    if unknown:
        parser.error(f"unknown features {sorted(unknown)}; there are {sorted(FEATURES)}")
    warnings.simplefilter("ignore")
    started = time.monotonic()
    tally: Counter[str] = Counter()
    seeds = range(given.seed, given.seed + given.count)
    compare = compare_second_order if given.second_order else compare_one
    for seed, outcome in outcomes(seeds, features, compare):
        kind = outcome.split(":")[0].split("\n")[0]
        tally[kind] += 1
        if outcome.startswith("FAILED") and tally[kind] <= 3:
            print(f"seed {seed}, features {given.features}: {outcome}")
    print(dict(tally), dict(STATISTICS), f"{time.monotonic() - started:.0f} s")
    return int(any(kind.startswith("FAILED") for kind in tally))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
