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
from telegrad.rpc.futures import CallFuture, begin_async
from telegrad.rpc.node import Node
from telegrad.rpc.rref import RRef, begin_fetch, begin_method, remote_method, remote_reference


def _arguments(
    where: Site, tensors: Sequence[Tensor], ints: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = where.arguments(
        tensors, ints, known_reference, real_reference
    )
    return arguments


def _names_a_value(args: tuple[Any, ...]) -> bool:
    return isinstance(args[0], RRef)


def begin(node: Node, where: Site, tensors: Sequence[Tensor], ints: Sequence[int]) -> Pending:
    """Begin a call for one who waits for it at once."""
    args, kwargs = _arguments(where, tensors, ints)
    if where.function is call_method and _names_a_value(args):
        return begin_method(args[0], where.timeout, *args[1:])
    if where.function is value_of and _names_a_value(args) and not args[0].is_owner():
        return begin_fetch(args[0], where.timeout)
    return node.call(where.worker, where.function, args, kwargs, where.timeout)


def begin_future(
    node: Node, where: Site, tensors: Sequence[Tensor], ints: Sequence[int]
) -> CallFuture:
    args, kwargs = _arguments(where, tensors, ints)
    if where.function is call_method and _names_a_value(args):
        rref, method, args, kwargs = args
        future: CallFuture = getattr(rref.rpc_async(where.timeout), method)(*args, **kwargs)
        return future
    return begin_async(node, where.worker, where.function, args, kwargs, where.timeout)


def begin_remote(
    node: Node, where: Site, tensors: Sequence[Tensor], ints: Sequence[int]
) -> RRef[Any]:
    args, kwargs = _arguments(where, tensors, ints)
    if where.function is call_method and _names_a_value(args):
        rref, method, args, kwargs = args
        return remote_method(rref, where.timeout, method, args, kwargs)
    return remote_reference(node, where.worker, where.function, args, kwargs, where.timeout)
