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
when it is traced is in the key (see sites.py), the rest in tensors. At run time the nodes use the
ordinary rpc layer; the records of autograd are made as for any other call (see
autograd/enclosed.py), so other workers cannot tell a compiled caller from another.

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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.compile import calls, passes, requests, torch_private
from telegrad.compile.calls import Call, leaving, new_token, record_of
from telegrad.compile.handles import value_of
from telegrad.compile.owner import take_apart
from telegrad.compile.passes import context_of
from telegrad.compile.shapes import (
    Expected,
    as_expected,
    expected,
    look_ahead,
    note_result,
    outputs_of,
)
from telegrad.compile.sites import Site, site
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.node import current_node

_library: Any = torch.library.Library("telegrad", "DEF")  # type: ignore[no-untyped-call]

_CALL = "str key, Tensor[] tensors, SymInt[] ints, bool[] needs, Tensor anchor"
_ORDER = "Tensor context, Tensor order"
_CONTEXT = "Tensor context, SymInt upper, SymInt lower, Tensor order"

for _schema in (
    f"call({_CALL}, bool record, Tensor[] shapes, {_ORDER}) -> (Tensor, Tensor[], Tensor)",
    f"issue({_CALL}, bool record, {_ORDER}) -> (Tensor, Tensor)",
    "wait(str key, Tensor token, Tensor[] shapes, SymInt[] ints, bool[] needs, Tensor order)"
    " -> (Tensor[], Tensor)",
    f"remote({_CALL}, bool record, Tensor[] shapes, {_ORDER}) -> (Tensor, Tensor[], Tensor)",
    "respond(Tensor token, Tensor[] gradients, int[] places) -> Tensor",
    "collect(Tensor token, Tensor after, bool[] needs, SymInt[] sizes, int[] ndims,"
    " ScalarType[] dtypes) -> Tensor[]",
    "enter(Tensor order) -> (Tensor, Tensor)",
    f"leave({_ORDER}) -> Tensor",
    f"begin_pass(bool retain, str mode, float? timeout, Tensor[] roots, {_CONTEXT})"
    " -> (Tensor[], Tensor)",
    f"end_pass(Tensor[] leaves, Tensor[] gradients, {_CONTEXT}) -> Tensor",
    f"perform(str key, Tensor(a!)[] changed, {_CONTEXT}) -> Tensor",
    "expect(str key, Tensor[] shapes, SymInt[] ints, bool[] needs) -> Tensor",
):
    # Whether an argument is contiguous makes a difference where it arrives.
    _library.define(_schema, tags=(torch.Tag.needs_exact_strides,))

ops = torch.ops.telegrad

NO_CONTEXT = torch.zeros(1, dtype=torch.float64)
"""Stands for the context of the thread that runs the graph."""

BY_TOKEN = (0, -1)
"""Stands for the number of a context that is known by its token."""


_DONE = torch.empty(0, dtype=torch.int64)


"""What says that an effect has taken place. It holds nothing, so where nobody would note that it is
always the same, it is."""


def _order() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _fresh(result: Any) -> Any:
    """For the dispatcher, which wants every output to be a new one."""
    if isinstance(result, tuple):
        return tuple([_order() if part is _DONE else part for part in result])
    return _order() if result is _DONE else result


_straight: dict[str, Callable[..., Any]] = {}


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def kernel(*args: Any) -> Any:
        with torch_private.above_autograd():
            return _fresh(function(*args))

    name = function.__name__
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _straight[name] = function
    return function


def _fake(name: str) -> Callable[[Callable[..., Any]], Any]:
    register: Any = torch.library.register_fake(f"telegrad::{name}", lib=_library)
    return register  # type: ignore[no-any-return]


# Forward.


@_kernel
def call(
    key: str,
    tensors: list[Tensor],
    ints: list[int],
    needs: list[bool],
    anchor: Tensor,
    record: bool,
    shapes: list[Tensor],
    context: Tensor,
    order: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor]:
    where = site(key)
    made, pending = calls.begin(
        where,
        tensors,
        ints,
        needs,
        anchor,
        context_of(context),
        record,
        requests.begin,
        _local_arguments(where),
    )
    try:
        result = made.result_of(current_node().wait(pending))
    finally:
        made.end()
    outputs = _arrived(made, where, result, expected(where, shapes, ints, needs))
    return new_token(made), outputs, _DONE


@_kernel
def issue(
    key: str,
    tensors: list[Tensor],
    ints: list[int],
    needs: list[bool],
    anchor: Tensor,
    record: bool,
    context: Tensor,
    order: Tensor,
) -> tuple[Tensor, Tensor]:
    where = site(key)
    made, future = calls.begin(
        where,
        tensors,
        ints,
        needs,
        anchor,
        context_of(context),
        record,
        requests.begin_future,
        _local_arguments(where),
    )
    made.future = future
    return new_token(made), _DONE


@_kernel
def wait(
    key: str,
    token: Tensor,
    shapes: list[Tensor],
    ints: list[int],
    needs: list[bool],
    order: Tensor,
) -> tuple[list[Tensor], Tensor]:
    made: Call = record_of(token)
    future, made.future = made.future, None
    if future is None:
        raise TelegradError(
            f"The result of a call ({made.where}) that a compiled function made was waited for "
            "twice at the same time. Wait once, and pass the result on."
        )
    where = site(key)
    result = made.result_of(future.wait())
    return _arrived(made, where, result, expected(where, shapes, ints, needs)), _DONE


def _local_arguments(where: Site) -> calls.Arguments | None:
    """What is behind a reference of this worker has a graph that others may use as well."""
    return None if where.function is value_of else requests.arguments_of


def _arrived(
    made: Call, where: Site, result: Any, said: Sequence[Expected | None] | None
) -> list[Tensor]:
    """The result of a call as the outputs of a node."""
    if type(result) is Tensor and said is not None:
        return as_expected(where, made.take([result]), said)
    outputs: list[Tensor] = []
    template = take_apart(result, outputs)
    note_result(where.key, template, type(result).__name__)
    return as_expected(where, _apart(made.take(outputs)), said)


def _apart(outputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a node may not share memory with each other."""
    if len(outputs) == 1:
        return outputs
    storages: set[int] = set()
    separate = []
    for output in outputs:
        storage = output.untyped_storage().data_ptr()
        separate.append(output.clone() if storage in storages else output)
        storages.add(storage)
    return separate


@_kernel
def remote(
    key: str,
    tensors: list[Tensor],
    ints: list[int],
    needs: list[bool],
    anchor: Tensor,
    record: bool,
    shapes: list[Tensor],
    context: Tensor,
    order: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor]:
    where = site(key)
    made, reference = calls.begin(
        where, tensors, ints, needs, anchor, context_of(context), record, requests.begin_remote
    )
    made.reference = reference
    said = expected(where, shapes, ints, needs)
    if said is None:
        outputs = outputs_of(current_node(), where, shapes, ints, needs, _no_unknown)
        return new_token(made), [_phantom(output) for output in outputs], _DONE
    return new_token(made), [_phantom_of(*each) for each in said if each is not None], _DONE


def _phantom(output: Tensor) -> Tensor:
    return torch.empty((), dtype=output.dtype, device=output.device).expand(output.shape)


def _phantom_of(dtype: torch.dtype, shape: tuple[int, ...], _: object) -> Tensor:
    return torch.empty((), dtype=dtype).expand(shape)


def _no_unknown() -> int:
    raise TelegradError(
        "The result of a remote call has a size that depends on data. Wait for it with rpc_sync or "
        "rpc_async in the compiled function, or refer to it outside of the compiled function."
    )


# Backward.


@_kernel
def respond(token: Tensor, gradients: list[Tensor], places: list[int]) -> Tensor:
    made: Call = record_of(token)
    try:
        made.fire({p: leaving(g) for p, g in zip(places, gradients, strict=True)})
    except BaseException as error:
        passes.fail_pass(made.context, error)
        raise
    return torch.zeros(1, dtype=torch.float64)


@_kernel
def collect(
    token: Tensor,
    after: Tensor,
    needs: list[bool],
    sizes: list[int],
    ndims: list[int],
    dtypes: list[torch.dtype],
) -> list[Tensor]:
    made: Call = record_of(token)
    try:
        found = made.await_gradients()
    except BaseException as error:
        passes.fail_pass(made.context, error)
        raise
    return _gradients(needs, sizes, ndims, dtypes, found)


def _gradients(
    needs: list[bool],
    sizes: list[Any],
    ndims: list[int],
    dtypes: list[torch.dtype],
    found: dict[int, Tensor],
) -> list[Tensor]:
    gradients, start = [], 0
    for place, (need, ndim, dtype) in enumerate(zip(needs, ndims, dtypes, strict=True)):
        shape = sizes[start : start + ndim]
        start += ndim
        if need:
            gradient = found.get(place)
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype)
            elif gradient.is_sparse:
                gradient = gradient.to_dense()
            gradients.append(gradient.contiguous())
    gradients.append(torch.zeros(()))
    return gradients


# Contexts, passes, effects.


@_kernel
def enter(order: Tensor) -> tuple[Tensor, Tensor]:
    return passes.enter(), _DONE


@_kernel
def leave(context: Tensor, order: Tensor) -> Tensor:
    passes.leave(record_of(context))
    return _DONE


@_kernel
def begin_pass(
    retain: bool,
    mode: str,
    timeout: float | None,
    roots: list[Tensor],
    context: Tensor,
    upper: int,
    lower: int,
    order: Tensor,
) -> tuple[list[Tensor], Tensor]:
    passes.begin_pass(context_of(context, upper, lower), retain, mode, timeout)
    return [torch.ones_like(root) for root in roots], _DONE


@_kernel
def end_pass(
    leaves: list[Tensor],
    gradients: list[Tensor],
    context: Tensor,
    upper: int,
    lower: int,
    order: Tensor,
) -> Tensor:
    passes.end_pass(context_of(context, upper, lower), leaves, gradients)
    return _DONE


@_kernel
def perform(
    key: str, changed: list[Tensor], context: Tensor, upper: int, lower: int, order: Tensor
) -> Tensor:
    passes.perform(key, changed, context_of(context, upper, lower))
    return _DONE


@_kernel
def expect(key: str, shapes: list[Tensor], ints: list[int], needs: list[bool]) -> Tensor:
    return _DONE


# Shapes.


def _token() -> Tensor:
    return torch.empty(1, dtype=torch.float64)


@_fake("call")
def _(key, tensors, ints, needs, anchor, record, shapes, context, order):  # type: ignore[no-untyped-def]
    unknown = torch.library.get_ctx().new_dynamic_size
    outputs = outputs_of(current_node(), site(key), shapes, ints, needs, unknown)
    return _token(), outputs, _order()


@_fake("issue")
def _(key, tensors, ints, needs, anchor, record, context, order):  # type: ignore[no-untyped-def]
    return _token(), _order()


@_fake("wait")
def _(key, token, shapes, ints, needs, order):  # type: ignore[no-untyped-def]
    unknown = torch.library.get_ctx().new_dynamic_size
    return outputs_of(current_node(), site(key), shapes, ints, needs, unknown), _order()


@_fake("remote")
def _(key, tensors, ints, needs, anchor, record, shapes, context, order):  # type: ignore[no-untyped-def]
    outputs = outputs_of(current_node(), site(key), shapes, ints, needs, _no_unknown)
    return _token(), [_phantom(output) for output in outputs], _order()


@_fake("respond")
def _(token, gradients, places):  # type: ignore[no-untyped-def]
    return _token()


@_fake("collect")
def _(token, after, needs, sizes, ndims, dtypes):  # type: ignore[no-untyped-def]
    return _gradients(needs, sizes, ndims, dtypes, {})


@_fake("enter")
def _(order):  # type: ignore[no-untyped-def]
    return _token(), _order()


@_fake("begin_pass")
def _(retain, mode, timeout, roots, context, upper, lower, order):  # type: ignore[no-untyped-def]
    return [torch.empty_like(root) for root in roots], _order()


@_fake("expect")
def _(key, shapes, ints, needs):  # type: ignore[no-untyped-def]
    look_ahead(current_node(), site(key), shapes, ints, needs)
    return _order()


for _name in ("leave", "end_pass", "perform"):
    _fake(_name)(lambda *_: _order())


# Differentiation.


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
    found = iter(ops.collect(token, after, ctx.needs, ctx.sizes, ctx.ndims, ctx.dtypes))
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
    return ops.respond(token, [gradients[place] for place in places], places)


def _wait_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shapes = len(inputs[2])
    ctx.nothing = (_none_for(inputs[3]), _none_for(inputs[4]))


def _wait_backward(ctx: Any, gradients: list[Tensor | None], _: Any) -> Any:
    return (None, _responded(ctx, gradients), [None] * ctx.shapes, *ctx.nothing, None)


for _name, _backward, _setup in (
    ("call", _call_backward, _shaped_setup),
    ("issue", _issue_backward, _issue_setup),
    ("remote", _remote_backward, _shaped_setup),
    ("wait", _wait_backward, _wait_setup),
):
    torch.library.register_autograd(
        f"telegrad::{_name}", _backward, setup_context=_setup, lib=_library
    )

del _straight["expect"]
for _name, _python in _straight.items():
    _first = _name in ("respond", "collect")
    torch_private.go_straight(getattr(ops, _name).default, _python, 0 if _first else -1)
