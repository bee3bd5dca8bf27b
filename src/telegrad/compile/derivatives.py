"""How the nodes of a graph are differentiated (see ops.py): the gradients of the results leave in a
node, then those of the arguments arrive in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ops = torch.ops.telegrad


class Derivative(NamedTuple):
    """What the node keeps when it runs, and what its gradients are."""

    setup: Callable[..., None]
    backward: Callable[..., Any]


def _none_for(values: Sequence[Any]) -> Any:
    """An empty list among the inputs counts as a list of tensors."""
    return None if values else []


def _save_call(ctx: Any, inputs: Any, token: Tensor) -> None:
    tensors, ints, needs = inputs[1:4]
    ctx.save_for_backward(token)
    ctx.needs = list(needs)
    ctx.nothing = (_none_for(ints), _none_for(needs))
    ctx.sizes = [size for tensor in tensors for size in tensor.shape]
    ctx.ndims = [tensor.dim() for tensor in tensors]
    ctx.dtypes = [tensor.dtype for tensor in tensors]


def _collected(ctx: Any, after: Tensor) -> tuple[list[Tensor | None], Tensor]:
    (token,) = ctx.saved_tensors
    found = iter(_ops.collect(token, after, ctx.needs, ctx.sizes, ctx.ndims, ctx.dtypes))
    return [next(found) if need else None for need in ctx.needs], next(found)


def _issue_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _save_call(ctx, inputs, output[0])


def _issue_backward(ctx: Any, after: Tensor, _: Any) -> Any:
    gradients, of_anchor = _collected(ctx, after)
    return (None, gradients, *ctx.nothing, of_anchor, None, None, None)


def _shaped_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _save_call(ctx, inputs, output[0])
    ctx.shapes = len(inputs[6])


def _remote_backward(ctx: Any, after: Tensor, *_: Any) -> Any:
    gradients, of_anchor = _collected(ctx, after)
    return (None, gradients, *ctx.nothing, of_anchor, None, [None] * ctx.shapes, None, None)


def _call_backward(ctx: Any, _: Any, gradients: list[Tensor | None], __: Any) -> Any:
    return _remote_backward(ctx, _responded(ctx, gradients))


def _responded(ctx: Any, gradients: list[Tensor | None]) -> Any:
    (token,) = ctx.saved_tensors
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    return _ops.respond(token, [gradients[place] for place in places], places)


def _wait_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shapes = len(inputs[2])
    ctx.nothing = (_none_for(inputs[3]), _none_for(inputs[4]))


def _wait_backward(ctx: Any, gradients: list[Tensor | None], _: Any) -> Any:
    return (None, _responded(ctx, gradients), [None] * ctx.shapes, *ctx.nothing, None)


CALL = Derivative(_shaped_setup, _call_backward)
ISSUE = Derivative(_issue_setup, _issue_backward)
REMOTE = Derivative(_shaped_setup, _remote_backward)
WAIT = Derivative(_wait_setup, _wait_backward)
