"""Relied upon: fake tensors with one symbol for each dynamic size, and a list of the guards on
those symbols; sizes that know the value they have in the call that is traced; operators in Python
for those whose own code wants plain numbers for sizes; errors of their own for code that asks what
is in a fake tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
    statically_known_true,
)

from telegrad.compile.expressions import Formula, encode


class Fakes:
    """Fake tensors, and what was asked about their sizes."""

    def __init__(self) -> None:
        self._shapes = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._symbols: dict[Any, Formula] = {}
        self._guards: list[Formula] = []

    def tensor(
        self,
        place: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        dynamic: tuple[bool, ...],
        strides: tuple[int, ...] | None,
        device: str,
        needs_gradient: bool,
    ) -> Tensor:
        """A fake tensor whose dynamic sizes are symbols, one for each."""
        # DYNAMIC, not DUCK: two sizes that are equal now may differ in the next call.
        kinds = [DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dynamic]
        example = (
            torch.empty(sizes, dtype=dtype, device=device)
            if strides is None
            else torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        )
        fake: Tensor = self._mode.from_tensor(
            example,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            source=ConstantSource(f"argument{place}"),
        )
        for dimension, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                symbol = size.node.expr
                self._symbols.setdefault(symbol, ("input", place, dimension))
                # Torch reasons about symbols as if they were at least 2.
                self._guards.append(("GreaterThan", self._symbols[symbol], 2))
        for dimension, stride in enumerate(fake.stride()):
            if isinstance(stride, torch.SymInt) and stride.node.expr.is_symbol:
                self._symbols.setdefault(stride.node.expr, ("stride", place, dimension))
        if not needs_gradient:
            return fake
        # What arrives is not a leaf: the function may change it.
        with self._mode, torch.enable_grad():
            leaf = fake.detach().requires_grad_()
            return torch.empty_strided(fake.shape, fake.stride(), dtype=dtype).copy_(leaf)

    def integer(self, place: int, value: int) -> Any:
        """An integer that is a symbol."""
        source = ConstantSource(f"integer{place}")
        symbol = self._shapes.create_symbol(
            value, source, DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self._symbols[symbol] = ("int", place)
        return self._shapes.create_symintnode(symbol, hint=value, source=source)

    def like(self, tensor: Tensor) -> Tensor:
        """A fake of a real tensor, with the sizes it has."""
        fake: Tensor = self._mode.from_tensor(tensor.detach(), static_shapes=True)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            with self._mode:
                return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake

    @contextmanager
    def active(self) -> Iterator[None]:
        # Some operators take symbols for sizes only in their Python form.
        with self._mode, enable_python_dispatcher():
            yield

    def is_contiguous(self, tensor: Tensor) -> bool:
        """Whether a fake tensor is contiguous whatever its sizes are. No guard comes of it."""
        step: Any = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            if not statically_known_true(stride == step):
                return False
            step = step * size
        return True

    def formula(self, size: int | torch.SymInt) -> Formula:
        """A size of an output in terms of the arguments."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        for symbol in sorted(free_unbacked_symbols(size), key=str):
            self._symbols.setdefault(symbol, ("unknown", len(self._symbols)))
        return encode(size.node.expr, self._symbols)

    def guards(self) -> tuple[Formula, ...]:
        asked = [encode(guard.expr, self._symbols) for guard in self._shapes.guards]
        return (*self._guards, *asked)


def asks_for_data(error: Exception) -> bool:
    """Whether a function failed because it wants to know what is in a fake tensor."""
    return isinstance(error, _ASKING_FOR_DATA) or ".numpy() is not supported" in str(error)


_ASKING_FOR_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def hint_of(size: int | torch.SymInt) -> int:
    """A size as it is in the call that is traced now, without a guard on it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    return 8 if hint is None else int(hint)


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Whether a size is known only when the function runs."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def seems_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds in the call that is traced now, without a guard on it."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    return bool(condition.node.hint)
