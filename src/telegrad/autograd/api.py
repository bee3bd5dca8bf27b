"""What users call: `context`, `backward`, `get_gradients`, `describe`.

with telegrad.autograd.context() as context_id:
    loss = rpc_sync("worker1", f, args=(x,)).sum()
    backward(context_id, [loss])
    gradients = get_gradients(context_id)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from telegrad.autograd.context import (
    Context,
    begin_work_in,
    current_context,
    end_work,
    refuse_nested,
)
from telegrad.autograd.crossing import AutogradCrossing
from telegrad.autograd.describe import gather, root_expression
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.figure import draw
from telegrad.autograd.messages import Mode, Options
from telegrad.autograd.roots import check_roots
from telegrad.autograd.service import Autograd
from telegrad.rpc.arguments import check_bound
from telegrad.rpc.current import current_node
from telegrad.rpc.node import Node, register_layer

register_layer("autograd", Autograd, AutogradCrossing())


def autograd_of(node: Node | None = None) -> Autograd:
    """The autograd layer of a node; by default of the node that the calling thread works for."""
    service: Autograd = (node or current_node()).services["autograd"]
    return service


def context() -> AbstractContextManager[int]:
    """Calls made in this block are recorded for `backward`; yields the id of the context.

    When the block ends the context is released on every worker that took part. A thread works in
    one context at a time; remote functions work in the context of their caller.
    """
    return _traced().Within() if is_dynamo_compiling() else _Within()


class _Within(AbstractContextManager[int]):
    """Makes a context and works in it, until the block ends."""

    __slots__ = ("_made", "_outside", "_service")

    def __enter__(self) -> int:
        refuse_nested()
        self._service = autograd_of()
        self._made = self._service.new_context()
        self._outside = begin_work_in(self._made)
        return self._made.id

    def __exit__(self, *_: object) -> None:
        try:
            end_work(self._outside)
        finally:
            self._service.release(self._made.id)


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
    mode: str = "smart",
    timeout: float | None = None,
) -> None:
    """Compute the gradients of `roots` on every worker that had a part in making them.

    Gradients go to the context, not to `.grad`: read them with `get_gradients` on each worker.
    Several passes over one context add up. `mode="fast"` asks that everything that crossed
    between workers is used; where it is not, `UnusedResult` names it. `timeout` in seconds bounds
    the whole pass.
    """
    if is_dynamo_compiling():
        _traced().backward(context_id, roots, retain_graph, create_graph, mode, timeout)
        return
    run_pass(context_id, roots, Options.of(retain_graph, create_graph, known_mode(mode)), timeout)


def run_pass(
    context_id: int,
    roots: Sequence[Tensor],
    options: Options,
    timeout: float | None,
    begins: Callable[[], None] = lambda: None,
) -> None:
    """`backward` with any options; `begins` is called when nothing is wrong with the arguments."""
    _check_arguments(context_id, roots)
    timeout = bound_of_pass(timeout)
    service = autograd_of()
    found = service.context(context_id)
    check_roots(roots)
    begins()
    service.backward(found, roots, options, timeout)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that the passes of a context found for the leaves on this worker."""
    _refuse_in_graph("get_gradients")
    return autograd_of().context(context_id).gradients()


def describe(context_id: int, roots: Sequence[Tensor] = ()) -> str:
    """What crossed between workers in a context, as a figure in text.

    All workers that hold the context are asked for their part. With `roots` it also shows how
    these tensors of the calling worker were computed from what arrived.
    """
    _refuse_in_graph("describe")
    service = autograd_of()
    found = service.context(context_id)
    name = service.node.members.name
    title = f"context {context_id}, made on {name(found.origin)}"
    return draw(title, gather(service, found), [root_expression(r, found) for r in roots], name)


def retrieve_context(context_id: int) -> Context:
    """This worker's part of a context, for inspection."""
    _refuse_in_graph("retrieve_context")
    return autograd_of().context(context_id)


def require_context() -> Context:
    """The context in which the calling thread works; an error if there is none."""
    _refuse_in_graph("require_context")
    found = current_context()
    if found is None:
        raise AutogradError(
            "This thread does not work in an autograd context. Enter one with "
            "`with telegrad.autograd.context() as context_id:`."
        )
    return found


def _refuse_in_graph(what: str) -> None:
    if is_dynamo_compiling():
        raise AutogradError(
            f"{what} cannot be a part of a graph: enter the context outside of the compiled "
            f"function, and call {what} there after it."
        )


def _traced() -> Any:
    """The same functions for Dynamo, which makes nodes of a graph of them."""
    from telegrad.compile import traced

    return traced


_MODES = {mode.value: mode for mode in Mode}


def known_mode(mode: str) -> Mode:
    known = _MODES.get(mode)
    if known is None:
        raise ValueError(f"mode must be 'smart' or 'fast', not {mode!r}.")
    return known


def bound_of_pass(timeout: float | None) -> float | None:
    """The `timeout` of a pass, checked; None: no bound."""
    if timeout is None:
        return None
    check_bound("timeout", timeout)
    return timeout or None


def no_arguments(context: str, roots: str) -> TypeError:
    """What to say of arguments of these types."""
    return TypeError(
        "backward(): incompatible function arguments. It takes a context id (int) and a list "
        f"of tensors, not {context} and {roots}."
    )


def _check_arguments(context_id: object, roots: object) -> None:
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise no_arguments(type(context_id).__name__, type(roots).__name__)
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(
                "backward(): incompatible function arguments. Each root must be a tensor, not "
                f"{type(root).__name__}."
            )
