"""What a node of a graph asks of the rpc layer.

A method of a value is called as eager mode calls it: the value is only named, and no reference
travels (see rpc/rref.py). When a graph is traced it is a call of a function with the reference
among its arguments, so that the owner can say what it returns like for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from telegrad.compile.handles import call_method, value_of
from telegrad.compile.references import known_reference, real_reference
from telegrad.compile.sites import Site
from telegrad.rpc.calls import Pending
from telegrad.rpc.current import current_node
from telegrad.rpc.futures import CallFuture, begin_async
from telegrad.rpc.rref import (
    RRef,
    begin_fetch,
    begin_method,
    begin_method_async,
    invocation,
    remote_method,
    remote_reference,
)
from telegrad.wire.codec import Packed


def arguments_of(
    where: Site, tensors: Sequence[Tensor], ints: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = where.arguments(
        tensors, ints, known_reference, real_reference
    )
    return arguments


def begin(where: Site, tensors: Sequence[Tensor], ints: Sequence[int]) -> Pending:
    """Begin a call for one who waits for it at once."""
    args, kwargs = arguments_of(where, tensors, ints)
    function = where.function
    if function is call_method and isinstance(args[0], RRef):
        message = _message(where, invocation(*args), tensors, ints)
        rref, name, args, kwargs = args
        return begin_method(rref, where.timeout, name, args, kwargs, message)
    if function is value_of and isinstance(args[0], RRef) and not args[0].is_owner():
        return begin_fetch(args[0], where.timeout)
    message = _message(where, (function, args, kwargs), tensors, ints)
    timeout = where.timeout
    return current_node().call(where.worker, function, args, kwargs, timeout, None, message)


def begin_future(where: Site, tensors: Sequence[Tensor], ints: Sequence[int]) -> CallFuture:
    """Begin a call for one who may wait later, or never: the answer is taken in when it comes."""
    args, kwargs = arguments_of(where, tensors, ints)
    function = where.function
    if function is call_method and isinstance(args[0], RRef):
        message = _message(where, invocation(*args), tensors, ints)
        rref, name, args, kwargs = args
        return begin_method_async(rref, where.timeout, name, args, kwargs, message)
    message = _message(where, (function, args, kwargs), tensors, ints)
    node = current_node()
    return begin_async(node, where.worker, function, args, kwargs, where.timeout, message)


def _message(
    where: Site, request: object, tensors: Sequence[Tensor], ints: Sequence[int]
) -> Packed | None:
    """What is to be sent for a request, if it was written before; else it is written down."""
    written = where.written
    if written is None:
        return None
    message = written.find(tensors, ints)
    if message is None:
        written.write(current_node(), where.worker.id, request, tensors, ints)
    return message


def begin_remote(where: Site, tensors: Sequence[Tensor], ints: Sequence[int]) -> RRef[Any]:
    args, kwargs = arguments_of(where, tensors, ints)
    if where.function is call_method and isinstance(args[0], RRef):
        rref, method, args, kwargs = args
        return remote_method(rref, where.timeout, method, args, kwargs)
    return remote_reference(
        current_node(), where.worker, where.function, args, kwargs, where.timeout
    )
