"""What `telegrad.rpc` and `telegrad.autograd` do while Dynamo traces them.

Dynamo inlines these functions. They are written for it: no locks, no tables, no exceptions for
control flow; what cannot be traced is behind `constant_of_graph` (sites.py, shapes.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from telegrad.autograd import api
from telegrad.autograd.errors import AutogradError
from telegrad.compile import torch_private
from telegrad.compile.arguments import Split, Template, same_reference, split
from telegrad.compile.calls import anchors
from telegrad.compile.handles import MadeRRef, MethodsOf, constant, to_here
from telegrad.compile.ops import BY_TOKEN, NO_CONTEXT, ops
from telegrad.compile.passes import HALF, bound_in_graph, effect, refuse_arguments, whole_graph_of
from telegrad.compile.shapes import (
    drop,
    find_answer,
    outputs_of,
    result_template,
    settled,
    template_of,
)
from telegrad.compile.sites import (
    NEVER,
    Site,
    eras,
    holding,
    locate,
    refuse_args,
    refuse_kwargs,
    worker_info,
)
from telegrad.compile.tracing import let_errors_be_handled
from telegrad.rpc.calls import describe_target
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.worker import WorkerInfo


class _State:
    """What the calls in a graph share. Dynamo keeps track of it as it does of any global."""

    order = torch.empty(0, dtype=torch.int64)
    context = NO_CONTEXT


_state = _State()
_state.order = _State.order
_state.context = _State.context


class TracedFuture:
    """What `rpc_async` gives inside of a compiled function."""

    def __init__(
        self,
        key: str,
        token: Tensor,
        shapes: list[Tensor],
        ints: list[int],
        needs: list[bool],
    ) -> None:
        self.key = key
        self.token = token
        self.shapes = shapes
        self.ints = ints
        self.needs = needs
        self.results: list[Any] = []
        """What came, once it was waited for."""

    def wait(self) -> Any:
        if not self.results:
            _leave_try_blocks()
            outputs, order = ops.wait(
                self.key, self.token, self.shapes, self.ints, self.needs, _state.order
            )
            _state.order = order
            self.results.append(_result(result_template(self.key), outputs))
        return self.results[0]

    def value(self) -> Any:
        return self.wait()

    def done(self) -> bool:
        raise TelegradError(
            "Whether a call is done cannot be a part of a graph: wait for the future, or make the "
            "call outside of the compiled function."
        )

    def then(self, callback: Callable[[Any], Any]) -> Any:
        raise TelegradError(
            "A future that a compiled function made takes no callbacks: wait for it and go on with "
            "the result, or make the call outside of the compiled function."
        )

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.then(callback)


def _result(template: Template, outputs: list[Tensor]) -> Any:
    kind = template[0]
    if kind == "tensor":
        output = outputs[template[1]]
        return output if template[2] else output.detach()
    if kind == "constant":
        return template[1]
    if kind == "list":
        return [_result(item, outputs) for item in template[1:]]
    if kind == "tuple":
        return tuple([_result(item, outputs) for item in template[1:]])
    return {key: _result(item, outputs) for key, item in template[1:]}


def _plain(to: str | int | WorkerInfo) -> str | int:
    if isinstance(to, WorkerInfo):
        return to.name
    return constant(to) if isinstance(to, int) else to


def _needs(tensors: list[Tensor]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]


def _located(
    to: Any, function: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None, timeout: Any
) -> tuple[str, Any, Split]:
    """The key under which a call is known, who runs it, and the tensors and numbers in it."""
    _leave_try_blocks()
    if args is not None and not isinstance(args, (tuple, list)):
        refuse_args(type(args).__name__)
    if kwargs is not None and not isinstance(kwargs, dict):
        refuse_kwargs(type(kwargs).__name__)
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    found = Split()
    template = split((args, kwargs), found)
    if timeout is not None:
        timeout = constant(timeout)
    traced = is_dynamo_compiling() and eras.now is not NEVER
    holder = None
    if isinstance(function, MethodType):
        holder, function = function.__self__, function.__func__
    key, owner = locate(_plain(to), function, holder, template, timeout, traced)
    if traced:
        # Nothing uses it, so it is in no graph that was optimized.
        ops.expect(key, found.shapes, found.ints, _needs(found.tensors))
    return settled(key), owner, found


def _leave_try_blocks() -> None:
    if is_dynamo_compiling():
        let_errors_be_handled()


def _operands(found: Split) -> tuple[Any, ...]:
    """What a call as a node of the graph takes besides its key."""
    return (
        found.tensors,
        found.ints,
        _needs(found.tensors),
        anchors.current,
        torch.is_grad_enabled(),
        found.shapes,
        _state.context,
        _state.order,
    )


def rpc_async(
    to: Any,
    function: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> TracedFuture:
    key, _, found = _located(to, function, args, kwargs, timeout)
    needs = _needs(found.tensors)
    token, order = ops.issue(
        key,
        found.tensors,
        found.ints,
        needs,
        anchors.current,
        torch.is_grad_enabled(),
        _state.context,
        _state.order,
    )
    _state.order = order
    return TracedFuture(key, token, found.shapes, found.ints, needs)


def rpc_sync(
    to: Any,
    function: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    key, _, found = _located(to, function, args, kwargs, timeout)
    _, outputs, order = ops.call(key, *_operands(found))
    _state.order = order
    return _result(result_template(key), outputs)


def remote(
    to: Any,
    function: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> MadeRRef:
    key, owner, found = _located(to, function, args, kwargs, timeout)
    token, value, order = ops.remote(key, *_operands(found))
    _state.order = order
    return MadeRRef(owner, token, tuple(value))


class Within:
    """`with telegrad.autograd.context()` inside of a compiled function."""

    def __init__(self) -> None:
        if _state.context is not NO_CONTEXT:
            raise AutogradError("Contexts do not nest: leave the outer context first.")

    def __enter__(self) -> TracedContext:
        token, order = ops.enter(_state.order)
        _state.order = order
        _state.context = token
        return TracedContext(token)

    def __exit__(self, *_: object) -> None:
        _state.order = ops.leave(_state.context, _state.order)
        _state.context = NO_CONTEXT


class TracedContext:
    """Stands for the id of a context that a compiled function entered."""

    def __init__(self, token: Tensor) -> None:
        self.token = token


def _context_of(context_id: Any) -> tuple[Tensor, int, int]:
    """A context as nodes take it: by its token, or by its id if it was entered outside."""
    if isinstance(context_id, TracedContext):
        return context_id.token, *BY_TOKEN
    if isinstance(context_id, int):
        return NO_CONTEXT, context_id >> HALF, context_id & ((1 << HALF) - 1)
    raise TypeError("A context id is what `with telegrad.autograd.context() as ...` gives.")


def backward(
    context_id: Any,
    roots: Any,
    retain_graph: bool = False,
    create_graph: bool = False,
    mode: str = "smart",
    timeout: float | None = None,
) -> None:
    if create_graph:
        raise NotImplementedError(
            "backward with create_graph cannot be traced: call it outside of the compiled function."
        )
    _leave_try_blocks()
    if not isinstance(roots, (list, tuple)) or not isinstance(context_id, (int, TracedContext)):
        known = isinstance(context_id, TracedContext)
        refuse_arguments("int" if known else type(context_id).__name__, type(roots).__name__)
    # What follows a break of the graph may run as it is.
    if not is_dynamo_compiling() or not whole_graph_of(*roots):
        between_graphs(context_id, roots, retain_graph, mode, timeout)
        return
    timeout = bound_in_graph(mode, timeout if timeout is None else constant(timeout))
    token, upper, lower = _context_of(context_id)
    roots = list(roots)
    seeds, order = ops.begin_pass(
        retain_graph,
        mode,
        timeout,
        [root.detach() for root in roots],
        token,
        upper,
        lower,
        _state.order,
    )
    leaves: list[Tensor] = []
    gradients: list[Tensor] = []
    torch_private.collected.active = True
    torch_private.collected.leaves = leaves
    torch_private.collected.gradients = gradients
    total = roots[0] * seeds[0]
    for root, seed in zip(roots[1:], seeds[1:], strict=True):
        total = total + root * seed
    with torch_private.TRACING_BACKWARD:
        total.backward(retain_graph=retain_graph)
    torch_private.collected.active = False
    with torch.enable_grad():  # See differentiated_by_engine.
        _state.order = ops.end_pass(leaves, gradients, token, upper, lower, order)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def between_graphs(
    context_id: Any, roots: Any, retain_graph: bool, mode: str, timeout: float | None
) -> None:
    """A pass in eager mode. Dynamo breaks the graph here."""
    api.backward(context_id, roots, retain_graph, False, mode, timeout)


def perform(owner: object, method: str, context_id: Any, changed: list[Tensor]) -> None:
    """`owner.method(context_id)` as a node of the graph, which changes these tensors."""
    _leave_try_blocks()
    in_context = context_id is not None
    token, upper, lower = _context_of(context_id) if in_context else (NO_CONTEXT, *BY_TOKEN)
    key = effect(owner, method, in_context)
    with torch.no_grad():
        _state.order = ops.perform(key, changed, token, upper, lower, _state.order)


_nested = itertools.count()


def result_on_fakes(
    node: Any, to: WorkerInfo, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """What a call would return whose arguments are fake tensors of this process."""
    found = Split()
    template = split((tuple(args), kwargs), found)
    needs = _needs(found.tensors)
    where = Site(f"nested {next(_nested)}", to, holding(function), template, None)
    answer = find_answer(node, where, found.shapes, found.ints, needs)
    outputs = outputs_of(node, where, found.shapes, found.ints, needs, _new_unknown)
    drop(where)
    for output in outputs:
        if output.is_floating_point() and torch.is_grad_enabled():
            output.requires_grad_()
    return _result(template_of(describe_target(function), answer), outputs)


def _new_unknown() -> Any:
    raise TelegradError(
        "A function that a compiled function calls makes itself a call whose result has a size "
        "that depends on data. Declare what it returns with telegrad.compile.declare_fake."
    )


__all__ = [
    "MethodsOf",
    "TracedFuture",
    "Within",
    "backward",
    "perform",
    "remote",
    "result_on_fakes",
    "rpc_async",
    "rpc_sync",
    "same_reference",
    "to_here",
    "worker_info",
]
