"""Results that stay where they were made.

A `Lazy` stands for what a remote call will return. Given to another remote module, it is fetched by
that module's worker from the worker that has it: the activation goes straight from one to the
other, and so does its gradient in the backward pass. The caller sends and receives a few bytes.

The module's worker needs the value for the time of the call only, and so the value is *lent* to it:
the call names it, the caller keeps its own reference until the call has ended, and the owner is
told nothing. A `Lazy` that is sent in any other way is a reference of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from telegrad import autograd
from telegrad.nn.ambient import Ambient, ambient, under
from telegrad.rpc import RRef, WorkerInfo, remote, rpc_sync
from telegrad.rpc.current import current_node
from telegrad.rpc.loans import Loan
from telegrad.rpc.outside import outside_of_graphs
from telegrad.rpc.rref import remote_method

T = TypeVar("T")
_TENSORS = {torch.Tensor}


@dataclass(frozen=True, slots=True)
class Lazy(Generic[T]):
    """A value on another worker, made or still in the making. It can be sent to any worker."""

    rref: RRef[T]

    @property
    def owner(self) -> WorkerInfo:
        return self.rref.owner()

    def to_here(self, timeout: float | None = None) -> T:
        """The value on this worker: waits for it, and raises what went wrong in its making."""
        return self.rref.to_here(timeout)

    @outside_of_graphs
    def then(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Lazy[Any]:
        """`function(value, *args, **kwargs)`, run where the value is, and left there.

        Lazy arguments are fetched by that worker. `loss = output.then(nn.functional.mse_loss, y)`
        keeps the output of a model and its loss on the worker of its last layer.
        """
        call = (function, ambient(), (self, *args), kwargs)
        return Lazy(remote(self.owner, run_where_it_is, call))

    @outside_of_graphs
    def backward(self, context_id: int, timeout: float | None = None, **options: Any) -> None:
        """`telegrad.autograd.backward(context_id, [value], **options)`, led by the owner."""
        rpc_sync(self.owner, _backward, (self, context_id, timeout, options), timeout=timeout)


def run_where_it_is(
    function: Callable[..., Any], around: Ambient | None, args: Any, kwargs: dict[str, Any]
) -> Any:
    """On the owner: wait for lazy arguments, then call."""
    args, kwargs = resolve(args), resolve(kwargs)
    with under(around):
        return function(*args, **kwargs)


PLAIN = {torch.Tensor, Lazy}
"""What most arguments of modules are."""


def _backward(
    lazy: Lazy[Any], context_id: int, timeout: float | None, options: dict[str, Any]
) -> None:
    autograd.backward(context_id, [lazy.to_here(timeout)], timeout=timeout, **options)


def lazily(
    module: RRef[Any], timeout: float | None, method: str, request: tuple[Any, ...]
) -> Lazy[Any]:
    """What that method of a hosted module or stage will return, left there."""
    lenders: list[RRef[Any]] = []
    named = lent(request, lenders)
    return Lazy(remote_method(module, timeout, method, named, {}, tuple(lenders)))


def lent(value: Any, lenders: list[RRef[Any]]) -> Any:
    """The value with each `Lazy` in it (in lists, tuples and dicts) as a loan; notes who lends."""
    if type(value) is Lazy:
        lenders.append(value.rref)
        return Loan.of(value.rref)
    if type(value) is tuple:
        kinds = {*map(type, value)}
        if kinds <= _TENSORS:
            return value
        if kinds <= PLAIN:
            lenders += [each.rref for each in value if type(each) is Lazy]
            return tuple([Loan.of(x.rref) if type(x) is Lazy else x for x in value])
    if isinstance(value, list | tuple | dict):
        return with_each(value, lambda item: lent(item, lenders))
    return value


def resolve(value: Any) -> Any:
    """The value with each `Lazy` and loan in it (in containers, too) replaced by what it is."""
    kind = type(value)
    if kind is Loan:
        return value.take(current_node())
    if kind is Lazy:
        return value.to_here()
    if isinstance(value, list | tuple | dict):
        return with_each(value, resolve)
    return value


def with_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A list, a tuple or a dict, of whatever class, with each item changed; the same if none is."""
    if isinstance(value, dict):
        items = {key: change(item) for key, item in value.items()}
        same = all(items[key] is item for key, item in value.items())
        return value if same else like(value, items)
    changed = [change(item) for item in value]
    same = all(new is old for new, old in zip(changed, value, strict=True))
    return value if same else like(value, changed)


def like(value: Any, items: Any) -> Any:
    """A list, a tuple or a dict of the class of `value`, with these items instead of its own."""
    if type(value) in (list, tuple, dict):
        return type(value)(items)
    if hasattr(value, "_make"):
        return value._make(items)
    if isinstance(value, tuple):
        return type(value)(items)
    made = copy.copy(value)
    if isinstance(value, list):
        made[:] = items
    else:
        for key, item in items.items():
            made[key] = item
    return made
