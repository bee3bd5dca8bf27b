"""Contexts, backward passes and other effects from inside of compiled functions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from telegrad.autograd.api import autograd_of, require_context
from telegrad.autograd.context import Context
from telegrad.autograd.messages import Mode, Options
from telegrad.compile.calls import new_token, record_of


def enter() -> Tensor:
    """A new context; released by `leave`, or when its token goes because the graph failed."""
    service = autograd_of()
    context = service.new_context()
    token = new_token(context)
    return token


def leave(context: Context) -> None:
    autograd_of().release(context.id)


def context_of(token: Tensor) -> Context:
    context: Context = require_context() if token.numel() == 1 else record_of(token)
    return context


def begin_pass(context: Context, retain: bool, mode: str) -> None:
    raise NotImplementedError


def end_pass(context: Context, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    raise NotImplementedError


_effects: dict[str, Callable[[Context], Any]] = {}


def perform(key: str, context: Context) -> None:
    _effects[key](context)
