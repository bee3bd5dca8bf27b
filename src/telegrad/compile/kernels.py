"""What the nodes of a graph do when it runs (see ops.py).

At run time they use the ordinary rpc layer; the records of autograd are made as for any other call
(see autograd/enclosed.py), so other workers cannot tell a compiled caller from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.compile import calls, passes, requests
from telegrad.compile.calls import Call, leaving, new_token, record_of
from telegrad.compile.handles import value_of
from telegrad.compile.owner import take_apart
from telegrad.compile.passes import context_of
from telegrad.compile.shapes import Expected, as_expected, expected, note_result, outputs_of
from telegrad.compile.sites import Site, site
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import TelegradError

DONE = torch.empty(0, dtype=torch.int64)
"""What says that an effect has taken place. It holds nothing, so where nobody would note that it is
always the same, it is."""


# Forward.


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
    made, pending = _begin(where, tensors, ints, needs, anchor, record, context, requests.begin)
    try:
        result = made.result_of(current_node().wait(pending))
    finally:
        made.end()
    outputs = _arrived(made, where, result, expected(where, shapes, ints, needs))
    return new_token(made), outputs, DONE


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
    made, future = _begin(
        where, tensors, ints, needs, anchor, record, context, requests.begin_future
    )
    made.future = future
    return new_token(made), DONE


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
    return _arrived(made, where, result, expected(where, shapes, ints, needs)), DONE


def _begin(
    where: Site,
    tensors: list[Tensor],
    ints: list[int],
    needs: list[bool],
    anchor: Tensor,
    record: bool,
    context: Tensor,
    send: Callable[[Site, list[Tensor], Sequence[int]], Any],
) -> tuple[Call, Any]:
    """Make a call whose result comes here."""
    # What is behind a reference of this worker has a graph that others may use as well.
    arguments = None if where.function is value_of else requests.arguments_of
    held = context_of(context)
    return calls.begin(where, tensors, ints, needs, anchor, held, record, send, arguments)


def _arrived(made: Call, where: Site, result: Any, said: Sequence[Expected] | None) -> list[Tensor]:
    """The result of a call as the outputs of a node."""
    if type(result) is Tensor and said is not None:
        plain = made.take([result])
        return as_expected(where, plain, said, made.differentiable)
    outputs: list[Tensor] = []
    template = take_apart(result, outputs)
    note_result(where.key, template, type(result).__name__)
    plain = _apart(made.take(outputs))
    return as_expected(where, plain, said, made.differentiable)


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
        outputs = outputs_of(current_node(), where, shapes, ints, needs, no_unknown)
        return new_token(made), [phantom(output) for output in outputs], DONE
    return (
        new_token(made),
        [_phantom_of(each[0], each[1]) for each in said if each[1] is not None],
        DONE,
    )


def phantom(output: Tensor) -> Tensor:
    return torch.empty((), dtype=output.dtype, device=output.device).expand(output.shape)


def _phantom_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty((), dtype=dtype).expand(shape)


def no_unknown() -> int:
    raise TelegradError(
        "The result of a remote call has a size that depends on data. Wait for it with rpc_sync or "
        "rpc_async in the compiled function, or refer to it outside of the compiled function."
    )


# Backward.


def respond(token: Tensor, gradients: list[Tensor], places: list[int]) -> Tensor:
    made: Call = record_of(token)
    try:
        made.fire({p: leaving(g) for p, g in zip(places, gradients, strict=True)})
    except BaseException as error:
        passes.fail_pass(made.context, error)
        raise
    return torch.zeros(1, dtype=torch.float64)


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
    return gradients_of(needs, sizes, ndims, dtypes, found)


def gradients_of(
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


def enter(order: Tensor) -> tuple[Tensor, Tensor]:
    return passes.enter(), DONE


def leave(context: Tensor, order: Tensor) -> Tensor:
    passes.leave(record_of(context))
    return DONE


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
    return [torch.ones_like(root) for root in roots], DONE


def end_pass(
    leaves: list[Tensor],
    gradients: list[Tensor],
    context: Tensor,
    upper: int,
    lower: int,
    order: Tensor,
) -> Tensor:
    passes.end_pass(context_of(context, upper, lower), leaves, gradients)
    return DONE


def perform(
    key: str, changed: list[Tensor], context: Tensor, upper: int, lower: int, order: Tensor
) -> Tensor:
    passes.perform(key, changed, context_of(context, upper, lower))
    return DONE


def expect(key: str, shapes: list[Tensor], ints: list[int], needs: list[bool]) -> Tensor:
    return DONE
