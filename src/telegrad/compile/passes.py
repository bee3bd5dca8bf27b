"""Contexts, backward passes and other effects from inside of compiled functions.

A backward pass that is traced has its local part in the graph: the nodes between `begin_pass` and
`end_pass` are what the engine would run. The pass itself is an ordinary one, open in between.

A graph that fails half-way never reaches `leave`. The record of a context lives as long as its
token, so the context is released when the frame of the graph goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.api import autograd_of, require_context
from telegrad.autograd.context import Context
from telegrad.autograd.crossing import engine_thread
from telegrad.autograd.messages import Mode, Options
from telegrad.autograd.service import Autograd, OpenPass
from telegrad.compile.calls import new_token, record_of


@dataclass(slots=True, eq=False)
class Entered:
    """A context that a compiled function entered."""

    service: Autograd
    context: Context

    def __del__(self) -> None:
        _open.pop(self.context.id, None)
        self.service.release(self.context.id)


_open: dict[int, OpenPass] = {}


def enter() -> Tensor:
    service = autograd_of()
    return new_token(Entered(service, service.new_context()))


def leave(entered: Entered) -> None:
    entered.service.release(entered.context.id)


def context_of(token: Tensor) -> Context | None:
    """The context that a token stands for; None: that of the thread."""
    return record_of(token).context if token.item() else None


def begin_pass(context: Context | None, retain: bool, mode: str, timeout: float | None) -> None:
    context = context or require_context()
    options = Options(retain_graph=retain, mode=Mode(mode))
    _open[context.id] = autograd_of().open_pass(context, options, timeout)


def end_pass(
    context: Context | None, leaves: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    context = context or require_context()
    _open.pop(context.id).close(leaves, gradients)


@contextmanager
def failing_pass(context: Context | None) -> Iterator[None]:
    """If a node of the backward part fails, the open pass does."""
    opened = None if context is None else _open.get(context.id)
    if opened is None or engine_thread.running is not opened.run:
        yield
        return
    with opened.failing():
        yield


_effects: dict[str, Callable[[int], Any]] = {}


def perform(key: str, context: Context | None) -> None:
    _effects[key]((context or require_context()).id)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def effect(owner: object, method: str) -> str:
    """The key under which `owner.method(context_id)` is performed. Runs while Dynamo traces."""
    key = f"{type(owner).__name__}.{method} #{id(owner)}"
    _effects[key] = getattr(owner, method)
    return key
