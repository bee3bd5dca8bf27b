"""What is asked while Dynamo traces, and is a constant of the graph.

Dynamo wraps an error that is raised meanwhile into one of its own, so that who catches `WorkerLost`
would not see it. It lets assertions pass. So an error that is raised here has the class that it
would have outside of a trace, and is an assertion besides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from telegrad.compile import torch_private
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.failures import parts_of, put_together, sendable

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_of_graph(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, with errors that keep their types."""

    @functools.wraps(function)
    def ask(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            if torch_private.code_being_traced() is None:
                raise
            raise passing(error) from error.__cause__

    marked: Any = torch.compiler.assume_constant_result(ask)  # type: ignore[no-untyped-call]
    return marked  # type: ignore[no-any-return]


@constant_of_graph
def let_errors_be_handled() -> bool:
    """For calls, of which the errors are raised when the graph runs: no handler in its code sees
    them then. So a call in a `try` block has to be between two graphs; where there is but one, that
    is an error."""
    if not torch_private.handles_errors(("telegrad", "torch")):
        return True
    sentence = (
        "A remote call, a wait or a backward is in a try block of a compiled function: its errors "
        "come when the graph runs, where no except and no finally of the function sees them. Put "
        "the try block outside of the compiled function"
    )
    if torch_private.may_break_graph():
        torch_private.break_graph(f"{sentence}.")
    raise TelegradError(f"{sentence}, or compile without fullgraph=True.")


def passing(error: Exception) -> Exception:
    """The same error, which Dynamo lets pass."""
    plain: Any = type(error)
    args, state = parts_of(error)
    passing = put_together(_class_of(plain), args, state)
    if type(passing) is not plain:
        vars(passing)["_as_it_was"] = (plain, args, state)
    return passing


@functools.lru_cache(maxsize=256)
def _class_of(cls: Any) -> Any:
    if issubclass(cls, torch_private.PASSES_THROUGH_DYNAMO):
        return cls
    bases = (cls, torch_private.PASSES_THROUGH_DYNAMO[0])
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, bases, {**named, "__reduce__": _plainly})


def _plainly(error: Any) -> Any:
    """It is sent as the error that it was, without what Dynamo has put into it."""
    cls, args, state = error._as_it_was
    return put_together, (cls, args, sendable(state))
