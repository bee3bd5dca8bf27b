"""Sizes as formulas that travel: nested tuples over the sizes and integers of the arguments.

The owner of a function finds that its output has, say, `s0 // 2` rows. Its symbols mean nothing to
the caller and its formula may not be code, so it becomes ("FloorDiv", ("input", 0, 1), 2): half
of the second size of the first tensor. The caller evaluates it on its own sizes, which may be
symbols again; comparisons then become guards of the caller's graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from telegrad.rpc.errors import TelegradError

Formula = Any
"""An int, or ("input", tensor, dimension), ("stride", tensor, dimension), ("int", place),
("unknown", number) or an operation."""


def _fold(step: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: functools.reduce(step, values)


def _modular_indexing(base: Any, divisor: Any, modulus: Any) -> Any:
    return base // divisor % modulus


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": _fold(operator.add),
    "Mul": _fold(operator.mul),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": _modular_indexing,
    "Max": _fold(torch.sym_max),
    "Min": _fold(torch.sym_min),
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": _fold(operator.and_),
    "Or": _fold(operator.or_),
    "Not": torch.sym_not,
}


def encode(expression: Any, symbols: Mapping[Any, Formula]) -> Formula:
    """A sympy expression as a formula. `symbols` says what each symbol stands for."""
    if expression in symbols:
        return symbols[expression]
    if isinstance(expression, int | bool):
        return expression
    if expression.is_Integer:
        return int(expression)
    if expression.is_Boolean and not expression.args:
        return bool(expression)
    name = type(expression).__name__
    if name not in _OPERATIONS:
        raise TelegradError(
            f"The size {expression} of an output of a remote function has the operation {name!r}, "
            "which cannot be traced: call the function outside of the compiled function."
        )
    return (name, *[encode(argument, symbols) for argument in expression.args])


def evaluate(
    formula: Formula,
    sizes: Sequence[Sequence[Any]],
    strides: Sequence[Sequence[Any]],
    ints: Sequence[Any],
    unknown: Callable[[int], Any],
) -> Any:
    """The value of a formula: an int, a bool, or a symbolic one."""
    if not isinstance(formula, tuple):
        return formula
    name, *rest = formula
    match name:
        case "input":
            return sizes[rest[0]][rest[1]]
        case "stride":
            return strides[rest[0]][rest[1]]
        case "int":
            return ints[rest[0]]
        case "unknown":
            return unknown(rest[0])
    return _OPERATIONS[name](*[evaluate(part, sizes, strides, ints, unknown) for part in rest])
