"""Contexts, backward passes and other effects from inside of compiled functions.

A backward pass that is traced has its local part in the graph: the nodes between `begin_pass` and
`end_pass` are what the engine would run. The pass itself is an ordinary one, open in between.

A graph that fails half-way never reaches `leave`. The record of a context lives as long as its
token, so the context is released when the frame of the graph goes.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.api import (
    autograd_of,
    bound_of_pass,
    known_mode,
    no_arguments,
    require_context,
)
from telegrad.autograd.context import Context, refuse_nested
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.messages import Mode, Options
from telegrad.autograd.nodes import engine_thread
from telegrad.autograd.roots import check_roots
from telegrad.autograd.service import Autograd, OpenPass
from telegrad.autograd.torch_private import tensor_hooks
from telegrad.compile import torch_private
from telegrad.compile.calls import anchors, find_record, new_token, record_of
from telegrad.compile.tracing import constant_of_graph, passing


@dataclass(slots=True, eq=False)
class Entered:
    """A context that a compiled function entered."""

    service: Autograd
    context: Context

    def __del__(self) -> None:
        _open.pop(self.context.id, None)
        self.service.release(self.context.id)


HALF = 32
"""Bits. The number of a context has 64, and graphs have integers of 63 and a sign: two halves."""

_open: dict[int, OpenPass] = {}


def enter() -> Tensor:
    refuse_nested()
    service = autograd_of()
    return new_token(Entered(service, service.new_context()))


def leave(entered: Entered) -> None:
    context = entered.context
    enclosures = list(context.enclosures)
    entered.service.release(context.id)
    anchors.give_back(enclosures)


def context_of(token: Tensor, upper: int = 0, lower: int = -1) -> Context | None:
    """The context that a token stands for, or one that was entered outside by its number; None:
    that of the thread."""
    if lower >= 0:  # As the lower half of every number is, also of one below zero.
        return autograd_of().container.get((upper << HALF) + lower)
    record = find_record(token)
    if record is None and token.item():
        record = record_of(token)
    return None if record is None else record.context


@constant_of_graph
def bound_in_graph(mode: str, timeout: float | None) -> float | None:
    """The `timeout` of a pass, checked with its mode as in eager mode. Runs while Dynamo traces."""
    known_mode(mode)
    return bound_of_pass(timeout)


@constant_of_graph
def refuse_arguments(context: str, roots: str) -> None:
    """What is given by these types is no context id and no list of tensors."""
    raise no_arguments(context, roots)


@constant_of_graph
def whole_graph_of(*roots: Tensor) -> bool:
    """Whether a pass from these roots can be a part of the graph that is being traced. If not, it
    has to run between two graphs; where there is but one, that is an error."""
    raise AssertionError("Dynamo does not call this function: it asks _has_whole_graph_of.")


def _has_whole_graph_of(roots: list[Tensor]) -> bool:
    try:
        check_roots(roots)
        _refuse_graph_outside(roots)
    except AutogradError as error:
        if torch_private.may_break_graph():
            return False
        raise passing(error) from None
    return True


def _refuse_graph_outside(roots: list[Tensor]) -> None:
    if not torch_private.graph_is_inside(roots):
        raise AutogradError(
            "backward in a compiled function needs its whole local graph inside, but a root "
            "depends on a tensor that was computed outside: its gradient would be lost. Call "
            "backward outside of the compiled function, compute all of it inside, or compile "
            "without fullgraph=True."
        )


torch_private.look_at_tensors(whole_graph_of, _has_whole_graph_of)


def begin_pass(context: Context | None, retain: bool, mode: str, timeout: float | None) -> None:
    context = context or require_context()
    options = Options.of(retain, False, Mode(mode))
    _open[context.id] = autograd_of().open_pass(context, options, timeout)


def end_pass(
    context: Context | None, leaves: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    context = context or require_context()
    pairs = zip(map(_real, leaves), gradients, strict=True)
    found = [each for each in pairs if not anchors.has(each[0])]
    opened = _open.pop(context.id)
    if not torch_private.differentiated_by_engine():
        with opened.failing():
            found = _seen_by_hooks(found)
    opened.close(*(zip(*found, strict=True) if found else ((), ())))


def _seen_by_hooks(found: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same after the hooks of the leaves, which the code of a graph knows nothing of. The
    engine calls them, as it does in eager mode."""
    hooked = [each for each in found if tensor_hooks(each[0])]
    if not hooked:
        return found
    leaves, gradients = zip(*hooked, strict=True)
    with torch_private.above_autograd(), torch.enable_grad():
        outputs = [leaf.view_as(leaf) for leaf in leaves]
        changed = torch.autograd.grad(outputs, leaves, gradients)
    unhooked = [each for each in found if not tensor_hooks(each[0])]
    return [*unhooked, *zip(leaves, changed, strict=True)]


class _Thread(threading.local):
    """What stands for a tensor in the rest of a graph since an effect has changed it, by memory."""

    def __init__(self) -> None:
        self.copies: weakref.WeakKeyDictionary[Any, dict[int, Tensor]] = weakref.WeakKeyDictionary()


_thread = _Thread()


def _real(leaf: Tensor) -> Tensor:
    if leaf.requires_grad:
        return leaf
    address = leaf.data_ptr()
    return next((c[address] for c in _thread.copies.values() if address in c), leaf)


def fail_pass(context: Context | None, error: BaseException) -> None:
    """A node of the backward part failed, and so does the open pass."""
    opened = None if context is None else _open.get(context.id)
    if opened is not None and engine_thread.running is opened.run:
        with opened.failing():
            raise error


_effects: dict[str, tuple[weakref.ref[Any], Callable[[Any, int | None], Any], bool]] = {}


def perform(key: str, changed: Sequence[Tensor], context: Context | None) -> None:
    """`changed` are the tensors of this process that the effect changes (`owner.changes`), so that
    no compiler moves what reads them to the other side of it; or copies that take their place."""
    reference, method, in_context = _effects[key]
    owner: Any = reference()
    method(owner, (context or require_context()).id if in_context else None)
    copies = {}
    with torch.no_grad():
        for seen, real in zip(changed, owner.changes if changed else (), strict=True):
            if seen.data_ptr() != real.data_ptr():
                seen.copy_(real)
                copies[seen.data_ptr()] = real
    if changed:
        _thread.copies[owner] = copies


@constant_of_graph
def effect(owner: object, method: str, in_context: bool) -> str:
    """The key under which `owner.method(context_id)` is performed, or `owner.method(None)`. Runs
    while Dynamo traces.

    What torch wraps around the method, such as hooks of optimizers, is traced: it must not take
    place once more.
    """
    key = f"{type(owner).__name__}.{method}({'id' if in_context else ''}) #{id(owner)}"
    # Dynamo guards the owner, so whoever runs the graph has it.
    _effects[key] = weakref.ref(owner), inspect.unwrap(getattr(type(owner), method)), in_context
    return key
