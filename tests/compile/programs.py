"""The random programs of the engine, driven by one compiled function.

The first worker of a program is the driver: this process. Its steps become lines of a function;
what other workers compute becomes calls that the function makes, with `rpc_sync`, `rpc_async` or
`remote` as the seed says, so values stay with their workers as references or come back and go
again. The function is compiled as one graph, and the gradients on all workers must be those of one
process.

    python -m tests.compile.programs --count 100 --seed 0 --backend inductor
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import telegrad
from telegrad import autograd, rpc
from tests.autograd.comparison import Mismatch, Skip, close, expectation, tolerance_of
from tests.autograd.machine import Machine, plain
from tests.autograd.program import (
    Constant,
    Cross,
    Operation,
    UseParameter,
    write_program,
)

PLAIN = frozenset[str]()
NAMES = ("main", "worker1", "worker2", "worker1")
"""Where the workers of a program are."""

_machines: dict[int, Machine] = {}


def prepare(seed: int) -> None:
    """Make this worker's own parameters of a program."""
    _machines.clear()
    _machines[seed] = Machine(write_program(seed, PLAIN), seed)


def machine(seed: int) -> Machine:
    return _machines[seed]


# What the driver calls.


def here(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value.to_here()


def compute(seed: int, k: int, a: Any, b: Any) -> Tensor:
    """One operation of a program."""
    own = machine(seed)
    step = own.program.steps[k]
    assert isinstance(step, Operation)
    a, b = here(a), here(b)
    if step.out:
        return own._compute(step, a, b)[0]
    changed = a.clone()
    own._change(step, changed, b)
    return changed


def parameter(seed: int, number: int) -> Tensor:
    return machine(seed).parameters[number]


def received(value: Any) -> Tensor:
    return here(value).clone()


def gradients(context_id: int, seed: int, name: str) -> dict[int, Tensor | None]:
    found = autograd.get_gradients(context_id)
    own = machine(seed)
    return {
        i: plain(found.get(p))
        for i, p in enumerate(own.parameters)
        if NAMES[own.program.parameters[i].worker] == name
    }


# Writing the function.


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(f"driver {seed}")
        self.program = write_program(seed, PLAIN)
        self.lines: list[str] = []
        self.leaves: set[int] = set()
        self.futures: set[int] = set()
        self.references: set[int] = set()
        self.same: dict[int, int] = {}
        """One tensor twice in a message is one tensor where it arrives: the later under the name of
        the first."""

    def write(self, roots: tuple[int, ...]) -> str:
        for k, step in enumerate(self.program.steps):
            match step:
                case UseParameter(worker, number, out):
                    self.leaves.add(out)
                    self._use(NAMES[worker], number, out)
                case Constant(worker, number, out):
                    self._line(f"v{out} = constants[{number}].clone()")
                case Cross(_, target, values, out, False):
                    first: dict[int, int] = {}
                    for value, arrived in zip(map(self._known, values), out, strict=True):
                        if value in first:
                            self.same[arrived] = first[value]
                        else:
                            first[value] = arrived
                            self._cross(NAMES[target], value, arrived)
                case Operation():
                    self._operate(k, step)
        sums = [f"{self._local(self._known(root))}.sum()" for root in roots]
        self._line(f"return [{', '.join(sums)}]")
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def drive(parameters, constants):\n{body}\n"

    def _known(self, number: int) -> int:
        return self.same.get(number, number)

    def _line(self, text: str) -> None:
        self.lines.append(text)

    def _value(self, number: int) -> str:
        if number in self.futures:
            self.futures.remove(number)
            self._line(f"v{number} = v{number}.wait()")
        return f"v{number}"

    def _local(self, number: int) -> str:
        if number in self.references:
            self.references.remove(number)
            self._line(f"v{number} = v{number}.to_here()")
        return self._value(number)

    def _given(self, name: str, number: int, owners: dict[int, str]) -> str:
        """An argument: a reference may be given to its owner only."""
        if number in self.references and owners.get(number) == name:
            return f"v{number}"
        return self._local(number)

    def _call(self, name: str, function: str, arguments: str, out: int) -> None:
        way = self.rng.choice(["rpc_sync", "rpc_sync", "rpc_async", "remote"])
        self._line(f"v{out} = rpc.{way}({name!r}, {function}, ({arguments}))")
        self.futures.discard(out)
        self.references.discard(out)
        if way == "rpc_async":
            self.futures.add(out)
        if way == "remote":
            self.references.add(out)

    def _use(self, name: str, number: int, out: int) -> None:
        if name == "main":
            self._line(f"v{out} = parameters[{number}]")
        else:
            self._call(name, "parameter", f"{self.seed}, {number}", out)

    def _cross(self, name: str, value: int, out: int) -> None:
        if name == "main":
            self._line(f"v{out} = {self._local(value)}.clone()")
        else:
            self._call(name, "received", f"{self._given(name, value, self._owners())},", out)

    def _owners(self) -> dict[int, str]:
        return {i: NAMES[worker] for i, worker in enumerate(self.program.home)}

    def _operate(self, k: int, step: Operation) -> None:
        name = NAMES[step.worker]
        one, other = self._known(step.a), self._known(step.b)
        if not step.out and one in self.leaves:
            return
        out = step.out[0] if step.out else one
        if name == "main":
            a, b = self._local(one), self._local(other)
            self._line(f"v{out} = compute({self.seed}, {k}, {a}, {b})")
        else:
            owners = self._owners()
            a, b = self._given(name, one, owners), self._given(name, other, owners)
            self._call(name, "compute", f"{self.seed}, {k}, {a}, {b}", out)


def write_driver(seed: int, roots: tuple[int, ...]) -> Callable[..., list[Tensor]]:
    text = _Writer(seed).write(roots)
    names = {"rpc": rpc, "compute": compute, "parameter": parameter, "received": received}
    exec(compile(text, f"<program {seed}>", "exec"), names)
    drive: Any = names["drive"]
    return drive  # type: ignore[no-any-return]


def compare(seed: int, backend: str | None) -> str:
    """Compile and run one program; None: without compiling."""
    expected = expectation(seed, PLAIN)
    for name in dict.fromkeys(NAMES):
        rpc.rpc_sync(name, prepare, (seed,))
    own = machine(seed)
    drive = write_driver(seed, expected.passes[0][1])
    backward_inside = random.Random(seed).random() < 0.5

    def step(parameters: list[Tensor], constants: list[Tensor], context_id: int) -> list[Tensor]:
        roots = drive(parameters, constants)
        if backward_inside:
            autograd.backward(context_id, roots, timeout=60)
            return [root.detach() for root in roots]
        return roots

    if backend is not None:
        torch._dynamo.reset()
        step = torch.compile(step, backend=backend, fullgraph=True)
    constants = [
        torch.randn(3, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        for n in range(own.program.workers)
    ]
    found: dict[int, Tensor | None] = {}
    with autograd.context() as context_id:
        roots = step(own.parameters, constants, context_id)
        if not backward_inside:
            autograd.backward(context_id, roots, timeout=60)
        for name in dict.fromkeys(NAMES[: own.program.workers]):
            found |= rpc.rpc_sync(name, gradients, (context_id, seed, name))
    tolerance = tolerance_of(expected.program)
    for i, gradient in found.items():
        if not close(expected.gradients[i], gradient, tolerance, strict=False):
            raise Mismatch(f"parameter {i}: {expected.gradients[i]} in one process, not {gradient}")
    return "equal"


def outcome(seed: int, backend: str | None) -> str:
    try:
        return compare(seed, backend)
    except Skip as skip:
        return f"skipped: {skip}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--backend", default="aot_eager")
    given = parser.parse_args(arguments)
    tally: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.count):
        try:
            tally[outcome(seed, given.backend).split(":")[0]] += 1
        except Exception as error:
            tally["FAILED"] += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    print(dict(tally))
    if tally["FAILED"]:
        raise SystemExit(1)


if __name__ == "__main__":
    from tests.compile import programs

    warnings.simplefilter("ignore")
    telegrad.run(lambda: programs.main(sys.argv[1:]), workers=2)
