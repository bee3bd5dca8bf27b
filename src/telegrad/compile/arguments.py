"""The arguments of a call, taken apart: tensors, integers, and a *template* of all the rest.

Tensors and integers change from call to call and become inputs of a graph node. The template is
what stays: nested tuples that say where each goes, with the constants in between. It is built while
Dynamo traces (`split` is inlined, so it is written in what Dynamo understands), and used to put
arguments together again on every worker that needs them (`builder`).

    ("tensor", 0)  ("int", 0)  ("constant", "mean")  ("list", ...)  ("tuple", ...)
    ("dict", (key, ...), ...)  ("call", ("constant", OrderedDict), ("dict", ...))
    ("worker", name, id)  ("rref", owner, ...)  ("made", 0)

"call" is an object that is made by calling something: what arrives has the type of what was given,
or is refused. "rref" is a reference that existed before the compiled function ran. "made" is one
that a compiled function made: it travels as a tensor, its token.
"""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.compile.handles import MadeRRef, constant
from telegrad.compile.references import remember
from telegrad.compile.tracing import constant_of_graph
from telegrad.rpc.rref import RRef
from telegrad.rpc.worker import WorkerInfo

Template = tuple[Any, ...]

CONSTANTS = (str, bytes, torch.dtype, torch.device, enum.Enum)


class Split:
    """What `split` has found so far."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.shapes: list[Tensor] = []
        """Tensors of the same shape that need no gradient: what the outputs' shapes follow from."""
        self.ints: list[int] = []


def split(value: Any, found: Split) -> Template:
    """Take a value apart. Inlined by Dynamo."""
    if isinstance(value, Tensor):
        # One tensor twice in a message is one tensor where it arrives.
        for place, known in enumerate(found.tensors):
            if known is value:
                return ("tensor", place)
        found.tensors.append(value)
        found.shapes.append(value.detach())
        return ("tensor", len(found.tensors) - 1)
    if isinstance(value, (bool, float)):
        return ("constant", constant(value))
    if value is None or isinstance(value, CONSTANTS):
        return ("constant", value)
    if isinstance(value, int):
        found.ints.append(value)
        return ("int", len(found.ints) - 1)
    if isinstance(value, (list, tuple, dict)):
        return _split_container(value, found)
    if isinstance(value, functools.partial):
        parts = [split(part, found) for part in (value.func, value.args, value.keywords)]
        return ("call", ("constant", _partial), *parts)
    if isinstance(value, MadeRRef):
        found.tensors.append(value.token)
        found.shapes.append(value.shape_of_value())
        return ("made", len(found.tensors) - 1)
    if isinstance(value, WorkerInfo):
        return ("worker", value.name, value.id)
    if isinstance(value, RRef):
        remember(value)
        return ("rref", *reference_of(value))
    if callable(value):
        return ("constant", value)
    refuse(type(value).__name__)
    return ()


def _split_container(value: Any, found: Split) -> Template:
    """Take a container apart, of which the type is kept. Inlined by Dynamo."""
    cls = type(value)
    if cls is list:
        return ("list", *[split(item, found) for item in value])
    if cls is tuple:
        return ("tuple", *[split(item, found) for item in value])
    if cls is dict:
        return ("dict", *[(key, split(item, found)) for key, item in value.items()])
    if cls is torch.Size:
        return ("call", ("constant", cls), split(tuple(value), found))
    if cls is OrderedDict:
        return ("call", ("constant", cls), split(dict(value), found))
    if cls is defaultdict:
        factory = split(value.default_factory, found)
        return ("call", ("constant", cls), factory, split(dict(value), found))
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return ("call", ("constant", cls), *[split(item, found) for item in value])
    refuse(cls.__name__)
    return ()


def _partial(function: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
    return functools.partial(function, *args, **keywords)


@constant_of_graph
def refuse(kind: str) -> None:
    """Say that nothing of a type can be an argument."""
    raise TypeError(
        f"A remote call in a compiled function is given a {kind}. It takes tensors, numbers, "
        "strings, references, functions, and lists, tuples (named ones, too) and dicts of these. "
        "Make other arguments outside of the compiled function, as an RRef on the worker that uses "
        "them."
    )


def reference_of(rref: RRef[Any]) -> tuple[int, ...]:
    """The numbers by which a reference is known. Inlined by Dynamo, which guards each of them."""
    return tuple([constant(number) for number in (*rref._reference, *rref._handle)])


def same_reference(one: RRef[Any], other: RRef[Any]) -> bool:
    """Whether both refer to the same value. Inlined by Dynamo, which does not guard the parts of
    named tuples that it compares."""
    return reference_of(one)[:3] == reference_of(other)[:3]


Builder = Callable[
    [
        Sequence[Any],
        Sequence[int],
        Callable[[tuple[int, ...]], Any],
        Callable[[Any], Any],
    ],
    Any,
]
"""Puts a value together from tensors, integers, and what it is told about references: what stands
for one that existed before, by its numbers, and for one that a compiled function made."""


def builder(template: Template) -> Builder:
    """What puts a value together again, for a template that is used many times: an expression, so
    that it takes one call, however nested the value is."""
    constants: dict[str, Any] = {}
    expression = _expression(template, constants)
    made: Builder = eval(f"lambda tensors, ints, reference, made: {expression}", constants)
    return made


def _expression(template: Template, constants: dict[str, Any]) -> str:
    """The source of a value. All that is not a place goes by a name of ours."""

    def named(value: Any) -> str:
        name = f"constant{len(constants)}"
        constants[name] = value
        return name

    def items(parts: Sequence[Template]) -> str:
        return "".join(f"{_expression(part, constants)}, " for part in parts)

    match template:
        case ("tensor", int(place)):
            return f"tensors[{place}]"
        case ("int", int(place)):
            return f"ints[{place}]"
        case ("constant", value):
            return named(value)
        case ("list", *parts):
            return f"[{items(parts)}]"
        case ("tuple", *parts):
            return f"({items(parts)})"
        case ("dict", *parts):
            pairs = [f"{named(key)}: {_expression(item, constants)}" for key, item in parts]
            return f"{{{', '.join(pairs)}}}"
        case ("call", called, *parts):
            return f"{_expression(called, constants)}({items(parts)})"
        case ("worker", name, number):
            return named(WorkerInfo(name, number))
        case ("rref", *numbers):
            return f"reference({named(tuple(numbers))})"
        case ("made", int(place)):
            return f"made(tensors[{place}])"
    raise AssertionError(f"not a template: {template!r}")


def holds_made(template: Template) -> set[int]:
    """The places of the tensors that are tokens of references."""
    kind = template[0]
    if kind == "made":
        return {template[1]}
    if kind in ("list", "tuple", "call"):
        return {place for item in template[1:] for place in holds_made(item)}
    if kind == "dict":
        return {place for _, item in template[1:] for place in holds_made(item)}
    return set()
