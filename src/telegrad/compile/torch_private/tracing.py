"""Relied upon:

* A compiled function knows the function that it was made from.
* Dynamo inlines a Python function, `polyfills.accumulate_grad`, for each leaf of a `backward` that
  it traces; so a function of ours in its place sees all leaves with their gradients.
* Dynamo's settings can be changed by a block in the code that it traces.
* Dynamo knows the code that it compiles, and forgets the graphs of one when it is told to.
* Dynamo begins a trace anew if it is told so by an error.
* Dynamo makes constants of what a function of ours returns by one function, and lets assertions
  that are raised meanwhile pass. What it takes for a wrapper around a function knows the wrapper.
* Dynamo says when a graph is complete; its placeholders know the tensors that they stand for, and
  expressions that find them in the frame of the function, whose code it remembers.
* Dynamo traces a call of one of torch's functions by one method of its variable.
* The fake tensors of a trace have graphs of their own; that of a graph input which has a graph
  outside begins with a node of its own, and an input that is a leaf outside is one inside.
* Dynamo takes any function as a guard, and knows whether it may break the graph.
* Dynamo's translators lead from the function that is inlined to the one that is compiled, each with
  its instruction and the handler of errors there; a handler of a `try` begins as no other does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import polyfills, symbolic_convert
from torch._dynamo.decorators import DynamoConfigPatchProxy
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException, unimplemented
from torch._dynamo.guards import get_verbose_code_parts, install_guard
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import orig_code_map
from torch._dynamo.variables import functions
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import (
    SkipFunctionVariable,
    WrapperUserFunctionVariable,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import ChainedSource


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it was before `torch.compile`."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


class Collected:
    """What a traced backward finds, while it is active: leaves and their gradients."""

    def __init__(self) -> None:
        self.active = False
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []


collected = Collected()
_accumulate = polyfills.accumulate_grad


def _collect_gradient(x: Tensor, variable_grad: Any, new_grad: Any) -> Any:
    """Inlined by Dynamo for each leaf; returns what is to become of its `.grad`."""
    if not collected.active:
        return _accumulate(x, variable_grad, new_grad)
    if new_grad is not None:
        collected.leaves.append(x)
        collected.gradients.append(new_grad)
    return variable_grad


def collect_gradients() -> None:
    """Have traced backward passes of ours see their leaves; others go on as before."""
    polyfills.accumulate_grad = _collect_gradient


collect_gradients()

TRACING_BACKWARD = DynamoConfigPatchProxy(torch._dynamo.config.patch(trace_autograd_ops=True))
"""In this block Dynamo traces `Tensor.backward`; elsewhere it does as the user's settings say.

`torch._dynamo.patch_dynamo_config` makes such objects, for fewer settings. Dynamo enters and leaves
the block while it traces, and leaves it also if it gives up."""


def once_traced(tell: Callable[[list[Tensor], CodeType, list[str]], None]) -> None:
    """When the graph that is being traced is complete, say which tensors it reads: those that are
    there before it is called; the code that it is of, and where the arguments are found."""
    output = InstructionTranslator.current_tx().output
    code: CodeType = output.root_tx.f_code

    def finish() -> None:
        found: list[Tensor] = []
        arguments: list[str] = []
        for node in output.placeholders:
            given = node.meta.get("grapharg")
            if given is None or not isinstance(given.example, Tensor):
                continue
            source: Any = given.source
            if _is_argument(source):
                arguments.append(source.name)
            else:
                found.append(given.example)
                if isinstance(source, ChainedSource) and _is_argument(source.get_base()):
                    arguments.append(source.name)
        tell(found, code, arguments)

    output.add_cleanup_hook(finish)


def _is_argument(source: Any) -> bool:
    return isinstance(source, LocalSource) and not source.is_derefed_cell_contents


def arguments_in(thread: int, names: Mapping[int, Sequence[str]]) -> list[Tensor]:
    """The tensors that a thread gave to the compiled function that it runs now. `names` says where
    they are found, by the identity of the function's code."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = orig_code_map.get(frame.f_code)
        if code is not None and id(code) in names:
            places = {"L": frame.f_locals, "G": frame.f_globals}
            return [t for name in names[id(code)] if (t := _look_up(name, places)) is not None]
        frame = frame.f_back
    return []


def _look_up(name: str, places: dict[str, Any]) -> Tensor | None:
    try:
        found = eval(name, places)
    except Exception:
        return None  # Let go of by the function, or found by a way of Dynamo's own.
    return found if isinstance(found, Tensor) else None


def code_being_traced() -> CodeType | None:
    """The code of the function that Dynamo compiles now, if it does; not of one that it inlines."""
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    return None if translator is None else translator.output.root_tx.f_code


def trace_again(reason: str) -> None:
    """Have Dynamo begin the trace of its function anew. To be called while it traces."""
    raise RestartAnalysis(restart_reason=reason)


PASSES_THROUGH_DYNAMO = (AssertionError, TorchDynamoException)
"""Errors of these classes that are raised in a trace reach the caller, or Dynamo, as they are."""


def explain_constants(function: Callable[..., Any], refusal: Callable[[], Exception]) -> None:
    """Have an error raised, in the place of Dynamo's, if something that is given to a function of
    which the result is a constant is none: an object that the compiled function makes itself, say,
    which exists only when the graph runs."""
    invoke = functions.invoke_and_store_as_constant

    def explained(tx: Any, called: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if called is function:
            args = list(map(_with_wrappers, args))
            if not all(map(_exists, args)):
                raise refusal()
        return invoke(tx, called, name, args, kwargs)

    functions.invoke_and_store_as_constant = explained  # type: ignore[assignment]


def look_at_tensors(function: Callable[..., Any], look: Callable[[list[Tensor]], Any]) -> None:
    """Have the result of a function, which is a constant of the graph, be what `look` says of the
    tensors that the function is given: fake ones, with the graph that was traced so far."""
    invoke = functions.invoke_and_store_as_constant

    def looking(tx: Any, called: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if called is not function:
            return invoke(tx, called, name, args, kwargs)
        return VariableTracker.build(tx, look([_fake(variable) for variable in args]))

    functions.invoke_and_store_as_constant = looking  # type: ignore[assignment]


def _fake(variable: Any) -> Tensor:
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    fake: Tensor = variable.as_proxy().node.meta["example_value"]
    return fake


def graph_is_inside(roots: Sequence[Tensor]) -> bool:
    """Whether all operations that led to these tensors were traced. If so, this is guarded: an
    argument that was a leaf may come with a graph the next time, of which torch takes no notice.
    To be called while Dynamo traces."""
    inputs = {}
    outside = set()
    for variable in InstructionTranslator.current_tx().output.input_source_to_var.values():
        if isinstance(variable, TensorVariable):
            fake = _fake(variable)
            inputs[id(fake)] = variable
            outside |= _nodes_of(fake)
    leaves = set()
    seen = set()
    nodes = [root.grad_fn for root in roots]
    while nodes:
        node = nodes.pop()
        if node in outside:
            return False
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                leaves.add(id(node.variable))
    for leaf in leaves & inputs.keys():
        source = inputs[leaf].source
        # A parameter is always a leaf.
        if source is not None and inputs[leaf].class_type is not nn.Parameter:
            install_guard(source.make_guard(_guard_leaf))
    return True


def _nodes_of(tensor: Tensor) -> set[Any]:
    """The last nodes of the graph of a tensor: its own and, if it is a view, that of the whole."""
    return {t.grad_fn for t in (tensor, tensor._base) if t is not None and t.grad_fn is not None}


def _guard_leaf(builder: Any, guard: Any) -> None:
    def is_leaf(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_leaf

    builder.get_guard_manager(guard).add_lambda_guard(
        is_leaf,
        get_verbose_code_parts(f"{builder.arg_ref(guard)} is a leaf", guard),
        guard.user_stack,
    )


def may_break_graph() -> bool:
    """Whether what cannot be traced may run between two graphs. To be called while Dynamo
    traces."""
    tx = InstructionTranslator.current_tx().output.current_tx
    return not (tx.one_graph or tx.error_on_graph_break)


def handles_errors(ours: tuple[str, ...]) -> bool:
    """Whether what is called now is in a `try` block of the compiled function or of one that it
    calls, other than those of packages that are `ours`. To be called while Dynamo traces."""
    tx: Any = InstructionTranslator.current_tx().output.current_tx
    while tx is not None:
        if tx.f_globals.get("__name__", "").split(".")[0] not in ours and _is_in_try(tx):
            return True
        tx = getattr(tx, "parent", None)
    return False


def _is_in_try(tx: Any) -> bool:
    """Handlers of a `with` block, and what tidies up after others, have handlers in their turn:
    those of the blocks around."""
    entry = tx.current_instruction.exn_tab_entry
    while entry is not None:
        place = tx.indexof[entry.target]
        following = tx.instructions[place + 1].opname
        if entry.target.opname == "PUSH_EXC_INFO" and following != "WITH_EXCEPT_START":
            return True
        entry = entry.target.exn_tab_entry
    return False


def break_graph(sentence: str) -> None:
    """Have what cannot be traced run between two graphs. To be called while Dynamo traces."""
    unimplemented(gb_type="telegrad", context="", explanation=sentence, hints=[])


def _with_wrappers(variable: Any) -> Any:
    """The same, with functions that `torch.compile` or a cache of `functools` has wrapped as
    constants, which Dynamo would call by what is inside of them."""
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    if isinstance(variable, WrapperUserFunctionVariable):
        return SkipFunctionVariable(variable.wrapper_obj, source=variable.source)
    if type(variable) is TupleVariable:
        return TupleVariable(list(map(_with_wrappers, variable.items)))
    return variable


def _exists(variable: Any) -> bool:
    if isinstance(variable, UserDefinedObjectVariable) and variable.source is not None:
        return True
    try:
        variable.as_python_constant()
    except NotImplementedError:
        return False
    return True


def forget_graphs(code: CodeType) -> None:
    """Have no graphs of a function any more. None of them may be running."""
    remove_from_cache(code)


def trace_instead(substitutes: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Have Dynamo trace functions of ours in the place of some of torch's.

    `torch.compiler.substitute_in_graph` does so for functions that Dynamo has no rule for.
    """
    call = TorchInGraphFunctionVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = substitutes.get(variable.value)
        if ours is None:
            return call(variable, tx, args, kwargs)
        return VariableTracker.build(tx, ours).call_function(tx, args, kwargs)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign, assignment]
