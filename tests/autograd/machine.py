"""Carries out the steps of a program, in one process or on workers.

What differs between the two is only how tensors cross, so that is all a machine is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.autograd.harness import clone_all
from tests.autograd.program import (
    SHAPES,
    Constant,
    Cross,
    Hook,
    LeafHook,
    Operation,
    Program,
    RetainGrad,
    Step,
    UseParameter,
)


class Boom(Exception):
    """Raised by a backward formula on purpose."""


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
            drawn = torch.randn(SHAPES[p.kind], generator=generator, dtype=torch.float64)
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

    # A hook that knew the machine would make a circle through torch, which nothing collects.

    def _hook(self, number: int, effect: str) -> Callable[[Tensor | None], Tensor | None]:
        calls = self.hook_calls

        def hook(gradient: Tensor | None) -> Tensor | None:
            calls.append((number, plain(gradient)))
            if gradient is None or effect == "look":
                return None
            return gradient.clamp(-1, 1) * 1.5 if effect == "clamp" else gradient * 2

        return hook

    def _hook_leaf(self, leaf: Tensor, number: int, after_accumulation: bool) -> None:
        calls = self.hook_calls

        def before(gradient: Tensor | None) -> Tensor | None:
            calls.append((number, plain(gradient)))
            return None if gradient is None else gradient * 0.5

        def after(leaf: Tensor) -> None:
            calls.append((number, plain(leaf.grad)))

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


def plain(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().clone()
