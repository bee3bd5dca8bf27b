"""Functions on their way, as torch RPC sends them.

A function travels inside of a `Udf`. It differs from telegrad's own way in six stock habits: the
callee prints the error of a function to its standard error, what it raises is a `RuntimeError` if
it is no `ValueError` or `TypeError` (but for a function that `remote` calls), an error of a class
that cannot be made of a message alone arrives as a `RuntimeError` with its words, so does that of
an operator with wrong arguments, and a function that the callee does not have fails when it is to
run, with the words that users search for, and several tensors of an operator are a list.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from telegrad.compat import stock
from telegrad.compat.rpc.failures import as_runtime_error
from telegrad.rpc.calls import describe_target
from telegrad.rpc.current import current_node
from telegrad.rpc.functions import is_async_execution
from telegrad.rpc.passage import Passage
from telegrad.rpc.reference_messages import ReferenceId, read_reference
from telegrad.rpc.results import as_result
from telegrad.rpc.value_requests import method_of
from telegrad.wire.codec import CodecError, Trust, extend
from telegrad.wire.errors import Refusal
from telegrad.wire.names import name_of, object_named

NOT_FOUND = (
    "{} Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both "
    "caller and callee modules."
)

NO_SCHEMA = "Overloaded torch operator invoked from Python failed to match any schema"


class Udf:
    """A user-defined function on its way to a callee."""

    __slots__ = ("__weakref__", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.function(*args, **kwargs)
            if type(result) is tuple and stock.is_list_of_operator(self.function):
                # Stock calls the operator and not its Python function, which makes a tuple.
                return list(result)
            return result
        except torch.jit.Error as error:
            raise RuntimeError(str(error)) from error
        except Exception as error:
            _report(error)
            if isinstance(error, TypeError) and stock.is_operator(self.function):
                raise RuntimeError(f"{NO_SCHEMA}: {error}") from error
            if not _is_made_of_words(error):
                raise RuntimeError(_described(error)) from error
            told = self._told(error)
            if told is error:
                raise
            before = error.__cause__ or error.__context__
            raise told.with_traceback(error.__traceback__) from before

    def _told(self, error: Exception) -> Exception:
        """What the caller is told of an error."""
        return as_runtime_error(error)

    def __repr__(self) -> str:
        return describe_target(self.function)

    @property
    def _telegrad_async_execution(self) -> bool:
        return is_async_execution(self.function)

    # The callee remembers which functions are slow: a Udf stands for its function.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Udf) and bool(self.function == other.function)

    def __hash__(self) -> int:
        return hash(self.function)


class ValueUdf(Udf):
    """A function that makes a value: of `to_here` stock gives errors as they are."""

    __slots__ = ()

    def _told(self, error: Exception) -> Exception:
        return error


class OwnersMethod:
    """A method of a value, for its owner to find by its name and to run inside of a `Udf`.

    The reference is only named, and not passed on: the caller keeps its own meanwhile.
    """

    __slots__ = ("__weakref__", "name", "reference")

    def __init__(self, reference: ReferenceId, name: str) -> None:
        self.reference = reference
        self.name = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        node = current_node()
        method = method_of(node, node.values.value(self.reference), self.name)
        return as_result(node.coroutines, method, method(*args, **kwargs))

    def __repr__(self) -> str:
        return f"method {self.name!r}"

    # As one function to those who remember which are slow, whatever the value.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnersMethod) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class _Missing:
    """A function that this worker does not have."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(NOT_FOUND.format(self._problem))


def _report(error: Exception) -> None:
    trace = "".join(traceback.format_exception(error))
    print(f"On {current_node().info}:\n{error!r}\n{trace}", file=sys.stderr)


def _is_made_of_words(error: Exception) -> bool:
    """Whether stock's caller could make the error again: it calls the class with a message."""
    try:
        return isinstance(type(error)(str(error)), type(error))
    except Exception:
        return False


def _described(error: Exception) -> str:
    return (
        f"A call failed on {current_node().info}, and its error cannot be made again of a message. "
        f"Original exception on remote side was {error!r}"
    )


def _leave(udf: Udf, passage: Passage) -> object:
    try:
        return (name_of(udf.function, passage.node.trust), None)
    except Refusal:
        return (None, udf.function)


def _arrive(data: Any, passage: Passage) -> Udf:
    return Udf(_function_of(data, passage))


def _arrive_for_value(data: Any, passage: Passage) -> ValueUdf:
    return ValueUdf(_function_of(data, passage))


def _function_of(data: Any, passage: Passage) -> Any:
    name, function = data
    if name is None:
        return function
    try:
        return object_named(name, passage.node.trust)
    except CodecError as error:
        if passage.node.trust is Trust.DATA:
            raise
        return _Missing(str(error))


def _leave_method(method: OwnersMethod, passage: object) -> object:
    return (tuple(method.reference), method.name)


def _arrive_method(data: Any, passage: object) -> OwnersMethod:
    reference, name = data
    return OwnersMethod(read_reference(reference), name)


def _leave_script(function: torch.jit.ScriptFunction[Any, Any], passage: object) -> str:
    return stock.script_function_name(function)


def _arrive_script(name: str, passage: object) -> torch.jit.ScriptFunction[Any, Any]:
    return stock.script_function(name)


def _leave_script_module(module: Any, passage: object) -> bytes:
    stream = io.BytesIO()
    torch.jit.save(module, stream)
    return stream.getvalue()


def _arrive_script_module(data: bytes, passage: object) -> Any:
    return stock.load_script_module(io.BytesIO(data))


extend("torch function", Udf, _leave, _arrive)
extend("torch function of a value", ValueUdf, _leave, _arrive_for_value)
extend("torch method", OwnersMethod, _leave_method, _arrive_method)
extend("script function", torch.jit.ScriptFunction, _leave_script, _arrive_script)
extend(
    "script module",
    stock.RecursiveScriptModule,
    _leave_script_module,
    _arrive_script_module,
)
