"""On the owner of a function: what would it return? Found out without doing anything real.

The function runs once for each kind of arguments, on fake tensors: shapes and types without data.
Every size that may differ from call to call is a symbol; what the function returns has sizes in
terms of those symbols, and what it asked about them on the way are the guards.

Nothing real may be touched:

* A value behind a reference (a module, say) is copied with fake tensors in the place of its real
  ones. Updates of buffers, as in a batch norm, go to the copy; nor can a call that runs at the
  same time on another thread see a fake parameter.
* Calls that the function makes to other workers are answered by what their owners would return.
* Compiled code must not see fake tensors. The copy of a module is not compiled; a function that
  was compiled is replaced by the one that was written.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from telegrad.compile import torch_private
from telegrad.compile.arguments import Template, builder
from telegrad.compile.expressions import Formula
from telegrad.compile.nested import NodeOfFakes
from telegrad.rpc.calls import describe_target
from telegrad.rpc.current import current_node, find_thread_node, set_thread_node
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.node import Node
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.layouts import is_sparse


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An argument: a tensor, or the value behind a reference that a compiled function made."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    dynamic: tuple[bool, ...]
    strides: tuple[int, ...] | None
    """None: not known, and taken for those of a contiguous tensor."""
    device: str
    needs_gradient: bool


@dataclass(frozen=True, slots=True)
class IntSpec:
    value: int
    dynamic: bool


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor that the function returns."""

    dtype: torch.dtype
    sizes: tuple[Formula, ...]
    strides: tuple[Formula, ...] | None
    """None: contiguous."""
    device: str
    needs_gradient: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function returns, while the guards hold."""

    outputs: tuple[OutputSpec, ...]
    template: Template | None
    """None: the function returns something that cannot be part of a graph."""
    guards: tuple[Formula, ...]
    kind: str = ""
    """What it returns, if not tensors."""


_declared: dict[Callable[..., Any], Callable[..., Any]] = {}


def declare_fake(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Say what a function returns whose result cannot be found out on fake tensors.

        @telegrad.compile.declare_fake(tokenize)
        def _(text_bytes):
            return torch.empty(text_bytes.shape[0] // 4, dtype=torch.int64)

    The stand-in takes the same arguments, as fake tensors, and returns tensors of the right shape
    and type. Declare it where the function is defined, so that its owner knows it.
    """

    def declare(fake: Callable[..., Any]) -> Callable[..., Any]:
        _declared[function] = fake
        return fake

    return declare


def _declared_for(function: Callable[..., Any]) -> Callable[..., Any] | None:
    try:
        return _declared.get(function)
    except TypeError:
        return None  # An object without a hash.


class FakeRRef:
    """Stands for a reference while its owner finds out what a function returns."""

    def __init__(self, owner: WorkerInfo, value: Any) -> None:
        self._owner = owner
        self._value = value

    def to_here(self, timeout: float | None = None) -> Any:
        return self._value

    def local_value(self) -> Any:
        return self._value

    def owner(self) -> WorkerInfo:
        return self._owner

    def owner_name(self) -> str:
        return self._owner.name

    def is_owner(self) -> bool:
        return True


def infer(
    function: Callable[..., Any],
    template: Template,
    tensors: Sequence[TensorSpec],
    ints: Sequence[IntSpec],
) -> Answer:
    """Run a function on fake tensors and say what came out."""
    # Its modules hold tensors: they must not be loaded while the fake ones are made.
    importlib.import_module("telegrad.compile.traced")
    node = current_node()
    fakes = torch_private.Fakes()
    inputs = [
        fakes.tensor(place, s.dtype, s.sizes, s.dynamic, s.strides, s.device, s.needs_gradient)
        for place, s in enumerate(tensors)
    ]
    numbers = [
        fakes.integer(place, s.value) if s.dynamic else s.value for place, s in enumerate(ints)
    ]

    def reference(numbers: tuple[int, ...]) -> FakeRRef:
        owner = node.members.member(numbers[0]).info
        if owner.id != node.info.id:
            raise TelegradError(
                f"A reference to a value on worker {owner.name!r} is given to a function on worker "
                f"{node.info.name!r} in a compiled function: what it returns cannot be known "
                "there. Make this call outside of the compiled function."
            )
        return FakeRRef(owner, fake_copy(node.values.value(ReferenceId(*numbers[:3])), fakes))

    def made(value: Tensor) -> FakeRRef:
        return FakeRRef(node.info, value)

    args, kwargs = builder(template)(inputs, numbers, reference, made)
    written = _declared_for(function) or torch_private.as_written(function)
    with fakes.active(), torch.enable_grad(), _calls_answered_by_fakes(node):
        try:
            result = written(*args, **kwargs)
        except Exception as error:
            if not torch_private.asks_for_data(error):
                raise
            raise _needs_data(function, node, error) from error
    return _answer(result, fakes)


def _needs_data(function: Callable[..., Any], node: Node, error: Exception) -> TelegradError:
    reason = str(error).strip().partition("\n")[0]
    return TelegradError(
        f"What {describe_target(function)} on worker {node.info.name!r} returns cannot be found "
        f"out on fake tensors, because it asks for the numbers in one ({reason}). Declare what it "
        "returns with telegrad.compile.declare_fake, or call it outside of the compiled function."
    )


@contextmanager
def _calls_answered_by_fakes(node: Any) -> Iterator[None]:
    before = find_thread_node()
    set_thread_node(cast(Node, NodeOfFakes(node)))
    try:
        yield
    finally:
        set_thread_node(before)


def fake_copy(value: Any, fakes: torch_private.Fakes) -> Any:
    """The same object, with fake tensors in it."""
    memo = {id(tensor): fakes.like(tensor) for tensor in tensors_in(value)}
    if isinstance(value, Tensor):
        return memo[id(value)]
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise TelegradError(
            f"A {type(value).__name__} cannot be copied ({error}), so what its methods return "
            "cannot be found out without calling them. Call them outside of the compiled function."
        ) from error


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()), depth)
    elif depth and hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()), depth - 1)


def _answer(result: Any, fakes: torch_private.Fakes) -> Answer:
    tensors: list[Tensor] = []
    template = take_apart(result, tensors)
    outputs = tuple(
        OutputSpec(
            tensor.dtype,
            tuple([fakes.formula(size) for size in tensor.shape]),
            _strides(tensor, fakes),
            str(tensor.device),
            tensor.requires_grad,
        )
        for tensor in tensors
    )
    kind = type(result).__name__
    if template is None and (misfit := _misfit(result, "")) is not None and misfit[1]:
        kind += " with a {} at {}".format(*misfit)
    return Answer(outputs, template, fakes.guards(), kind)


def _misfit(value: Any, path: str) -> tuple[str, str] | None:
    """The type of the first part of a result that cannot be in a graph, and where it is."""
    if type(value) in (list, tuple):
        pairs: Any = enumerate(value)
    elif type(value) is dict:
        pairs = value.items()
    else:
        fits = value is None or isinstance(value, Tensor)
        return None if fits else (type(value).__name__, path)
    found = (_misfit(item, f"{path}[{key!r}]") for key, item in pairs)
    return next((misfit for misfit in found if misfit is not None), None)


def _strides(tensor: Tensor, fakes: torch_private.Fakes) -> tuple[Formula, ...] | None:
    """The strides with which a tensor will arrive: those it has, unless it lies so thinly in its
    memory that a compact copy is sent. None: it is made contiguous where it arrives, as it is if
    its sizes are known only then."""
    if tensor.layout is not torch.strided or fakes.is_contiguous(tensor):
        return None
    if any(map(torch_private.depends_on_data, tensor.shape)):
        return None
    sizes = tuple(map(torch_private.hint_of, tensor.shape))
    strides = tuple(map(torch_private.hint_of, tensor.stride()))
    if is_sparse(tensor.dtype, sizes, strides):
        return None
    return tuple([fakes.formula(stride) for stride in tensor.stride()])


def take_apart(value: Any, tensors: list[Tensor]) -> Template | None:
    """How tensors make up a result; None if something else is in it."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1, value.requires_grad)
    if value is None:
        return ("constant", None)
    if type(value) in (list, tuple):
        items = [take_apart(item, tensors) for item in value]
        return None if None in items else (type(value).__name__, *items)
    if type(value) is dict:
        pairs = [(key, take_apart(item, tensors)) for key, item in value.items()]
        return None if any(item is None for _, item in pairs) else ("dict", *pairs)
    return None
