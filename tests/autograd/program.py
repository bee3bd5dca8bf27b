"""Random distributed programs: lists of steps over numbered values that live on workers.

A program says nothing of how it is run. `machine.py` carries out its steps, `programs.py` compares
a run on workers with a run in one process. Everything is drawn from the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

FEATURES = frozenset(
    {
        *("hook", "post", "custom", "undefined", "fail"),
        *("checkpoint", "module", "sparse", "late", "passes"),
    }
)
SHAPES = {"matrix": (3, 3), "vector": (3,), "embedding": (5, 3)}


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

_COMMON = (
    *("add", "mul", "mm", "sin", "bias", "gated", "residual", "slice"),
    *("unbind", "inplace", "copyslice", "cast", "detached", "view"),
)
_BY_FEATURE = {
    "custom": "two_outputs",
    "undefined": "undefined",
    "fail": "failing",
    "checkpoint": "checkpoint",
    "module": "module",
    "sparse": "embedding",
}


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
