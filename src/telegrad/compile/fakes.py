"""What the nodes of a graph give when it is traced: tensors that have a shape only (see ops.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from telegrad.compile.kernels import gradients_of, no_unknown, phantom
from telegrad.compile.shapes import look_ahead, outputs_of
from telegrad.compile.sites import site
from telegrad.rpc.current import current_node


def new_order() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _token() -> Tensor:
    return torch.empty(1, dtype=torch.float64)


def call(key, tensors, ints, needs, anchor, record, shapes, context, order):  # type: ignore[no-untyped-def]
    unknown = torch.library.get_ctx().new_dynamic_size
    outputs = outputs_of(current_node(), site(key), shapes, ints, needs, unknown)
    return _token(), outputs, new_order()


def issue(key, tensors, ints, needs, anchor, record, context, order):  # type: ignore[no-untyped-def]
    return _token(), new_order()


def wait(key, token, shapes, ints, needs, order):  # type: ignore[no-untyped-def]
    unknown = torch.library.get_ctx().new_dynamic_size
    return outputs_of(current_node(), site(key), shapes, ints, needs, unknown), new_order()


def remote(key, tensors, ints, needs, anchor, record, shapes, context, order):  # type: ignore[no-untyped-def]
    outputs = outputs_of(current_node(), site(key), shapes, ints, needs, no_unknown)
    return _token(), [phantom(output) for output in outputs], new_order()


def respond(token, gradients, places):  # type: ignore[no-untyped-def]
    return _token()


def collect(token, after, needs, sizes, ndims, dtypes):  # type: ignore[no-untyped-def]
    return gradients_of(needs, sizes, ndims, dtypes, {})


def enter(order):  # type: ignore[no-untyped-def]
    return _token(), new_order()


def begin_pass(retain, mode, timeout, roots, context, upper, lower, order):  # type: ignore[no-untyped-def]
    return [torch.empty_like(root) for root in roots], new_order()


def expect(key, shapes, ints, needs):  # type: ignore[no-untyped-def]
    look_ahead(current_node(), site(key), shapes, ints, needs)
    return new_order()


def order_only(*_: object) -> Tensor:
    """Of nodes that have an effect and give nothing else."""
    return new_order()
