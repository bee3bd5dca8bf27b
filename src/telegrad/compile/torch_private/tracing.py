"""Relied upon:

* A compiled function knows the function that it was made from.
* Dynamo inlines a Python function, `polyfills.accumulate_grad`, for each leaf of a `backward` that
  it traces; so a function of ours in its place sees all leaves with their gradients.
* Dynamo's settings can be changed by a block in the code that it traces.
* Dynamo knows the code that it compiles, and forgets the graphs of one when it is told to.
* Dynamo begins a trace anew if it is told so by an error.
* Dynamo makes constants of what a function of ours returns by one function, and lets assertions
  that are raised meanwhile pass.
* Dynamo says when a graph is complete; its placeholders know the tensors that they stand for, and
  expressions that find them in the frame of the function, whose code it remembers.
* Dynamo traces a call of one of torch's functions by one method of its variable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import polyfills, symbolic_convert
from torch._dynamo.decorators import DynamoConfigPatchProxy
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import orig_code_map
from torch._dynamo.variables import functions
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
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
        if called is function and not all(map(_exists, args)):
            raise refusal()
        return invoke(tx, called, name, args, kwargs)

    functions.invoke_and_store_as_constant = explained  # type: ignore[assignment]


def _exists(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
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
