"""Remote calls as nodes of a graph.

    call     makes a call and waits for it, gives its token and the results
    issue    makes a call, gives its token
    wait     takes the token, gives the results
    remote   makes a call whose result stays with its owner, gives the token of the reference
    respond  backward of call and wait: the gradients of the results leave
    collect  backward of call, issue and remote: the gradients of the arguments arrive
    enter, leave                a context
    begin_pass, end_pass        a backward pass
    perform                     an effect of ours, such as an optimizer's step
    expect   does nothing when it runs; when it is traced, the owner says what a call returns

Nothing is sent when a graph is traced; nothing about the graph is known when it runs. What is known
when it is traced is in the key (see sites.py), the rest in tensors. What the nodes do is in
kernels.py, what they give when they are traced in fakes.py, and their gradients in derivatives.py.

How the effects stay as they were written: every node that has one takes and gives an empty tensor,
`order`, so each depends on the one before; the last is an output of the graph, so none can be
dropped. Merging two equal calls is impossible for the same reason.

How the backward nodes stay: each call also takes the *anchor*, a leaf that needs a gradient. It
keeps the edge when no argument needs one (the parameters of the remote function may). Its gradient
is a real zero, or the backward nodes would be dropped as dead code and the gradients of remote
parameters vanish in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from telegrad.compile import derivatives, fakes, kernels, torch_private
from telegrad.compile.derivatives import Derivative

_library: Any = torch.library.Library("telegrad", "DEF")  # type: ignore[no-untyped-call]
ops = torch.ops.telegrad

NO_CONTEXT = torch.zeros(1, dtype=torch.float64)
"""Stands for the context of the thread that runs the graph."""

BY_TOKEN = (0, -1)
"""Stands for the number of a context that is known by its token."""


class _Node(NamedTuple):
    """A kind of node: what it takes and gives, what it does, and what it gives when it is traced.
    It is named after its kernel."""

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    derivative: Derivative | None = None
    place: int | None = -1
    """Where among the arguments a tensor always is (`go_straight`), if there is one."""


_CALL = "str key, Tensor[] tensors, SymInt[] ints, bool[] needs, Tensor anchor"
_ORDER = "Tensor context, Tensor order"
_CONTEXT = "Tensor context, SymInt upper, SymInt lower, Tensor order"

_NODES = (
    _Node(
        f"({_CALL}, bool record, Tensor[] shapes, {_ORDER}) -> (Tensor, Tensor[], Tensor)",
        kernels.call,
        fakes.call,
        derivatives.CALL,
    ),
    _Node(
        f"({_CALL}, bool record, {_ORDER}) -> (Tensor, Tensor)",
        kernels.issue,
        fakes.issue,
        derivatives.ISSUE,
    ),
    _Node(
        "(str key, Tensor token, Tensor[] shapes, SymInt[] ints, bool[] needs, Tensor order)"
        " -> (Tensor[], Tensor)",
        kernels.wait,
        fakes.wait,
        derivatives.WAIT,
    ),
    _Node(
        f"({_CALL}, bool record, Tensor[] shapes, {_ORDER}) -> (Tensor, Tensor[], Tensor)",
        kernels.remote,
        fakes.remote,
        derivatives.REMOTE,
    ),
    _Node(
        "(Tensor token, Tensor[] gradients, int[] places) -> Tensor",
        kernels.respond,
        fakes.respond,
        place=0,
    ),
    _Node(
        "(Tensor token, Tensor after, bool[] needs, SymInt[] sizes, int[] ndims,"
        " ScalarType[] dtypes) -> Tensor[]",
        kernels.collect,
        fakes.collect,
        place=0,
    ),
    _Node("(Tensor order) -> (Tensor, Tensor)", kernels.enter, fakes.enter),
    _Node(f"({_ORDER}) -> Tensor", kernels.leave, fakes.order_only),
    _Node(
        f"(bool retain, str mode, float? timeout, Tensor[] roots, {_CONTEXT})"
        " -> (Tensor[], Tensor)",
        kernels.begin_pass,
        fakes.begin_pass,
    ),
    _Node(
        f"(Tensor[] leaves, Tensor[] gradients, {_CONTEXT}) -> Tensor",
        kernels.end_pass,
        fakes.order_only,
    ),
    _Node(
        f"(str key, Tensor(a!)[] changed, {_CONTEXT}) -> Tensor",
        kernels.perform,
        fakes.order_only,
    ),
    _Node(
        "(str key, Tensor[] shapes, SymInt[] ints, bool[] needs) -> Tensor",
        kernels.expect,
        fakes.expect,
        place=None,
    ),
)


def _define(node: _Node) -> None:
    name = node.kernel.__name__
    # Whether an argument is contiguous makes a difference where it arrives.
    _library.define(name + node.schema, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, _dispatched(node.kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"telegrad::{name}", node.fake, lib=_library)
    if node.derivative is not None:
        setup, backward = node.derivative
        torch.library.register_autograd(
            f"telegrad::{name}", backward, setup_context=setup, lib=_library
        )
    if node.place is not None:
        torch_private.go_straight(getattr(ops, name).default, node.kernel, node.place)


def _dispatched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as the dispatcher calls it."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        with torch_private.above_autograd():
            return _fresh(kernel(*args))

    return run


def _fresh(result: Any) -> Any:
    """For the dispatcher, which wants every output to be a new one."""
    if isinstance(result, tuple):
        return tuple([fakes.new_order() if part is kernels.DONE else part for part in result])
    return fakes.new_order() if result is kernels.DONE else result


for _node in _NODES:
    _define(_node)
