"""Relied upon:

* The record that torch keeps of the types `ProcessGroup` and `DeviceMesh` has a place for a guard
  function, and says which of their methods are folded or traced.
* Dynamo makes variables of objects by one method, and knows by then which it has seen.
* Dynamo looks up how to trace `is` and `is not` in a table, and asks one method of each kind of
  object for its hash when the object is used as a key.
* Dynamo makes constants of what a function of ours returns by one function, to which it gives the
  variables of the arguments.
* Dynamo asks for a constant by one method of a variable, and goes another way if that raises one
  kind of error.
* Dynamo guards a constant by one method of its guard builder, and takes functions as guards.
* Dynamo guards by one method that a module has no hooks, and knows then whose graph it guards.
* Hooks of all modules are in four tables beside `torch.nn.Module`, and Dynamo guards lengths.
* A guard by identity ends when its object does, so that no other can take its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType, CodeType, MethodWrapperType
from typing import Any

import torch
from torch import nn
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator, compare_op_handlers
from torch._dynamo.variables import functions
from torch._dynamo.variables.base import AsPythonConstantNotImplementedError
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.user_defined import (
    FrozenDataClassVariable,
    UserDefinedObjectVariable,
)
from torch._library import opaque_object


class Opaque:
    """The record that torch keeps of a type whose objects are constants of a graph."""

    def __init__(self, cls: type) -> None:
        found: Any = opaque_object._resolve_opaque_type_info(cls)
        if found is None:
            raise ImportError(
                f"torch {torch.__version__} does not know {cls.__name__} as an opaque type: "
                "telegrad cannot guard it. Use a torch version that telegrad supports (2.13)."
            )
        self._record = found
        self._guard = found.guard_fn

    def guard(self, identity: Callable[[Any], list[Any]]) -> None:
        """Have objects guarded by what `identity` says of them, besides torch's own guard."""
        own = self._guard

        def everything(value: Any) -> list[Any]:
            return [*(own(value) if own is not None else ()), *identity(value)]

        self._record.guard_fn = everything

    def fold(self, method: str) -> None:
        """Have the result of a method be a constant; the guard must see to it that it is."""
        self._record.members.setdefault(method, opaque_object.MemberType.USE_REAL)

    def trace(self, method: str) -> None:
        """Have a method traced."""
        self._record.members.setdefault(method, opaque_object.MemberType.INLINED)


def guard_identity(classes: tuple[type, ...]) -> None:
    """Have compiled functions notice when `is` and `is not` have another object to compare."""

    def guarded(compare: Callable[..., Any]) -> Callable[..., Any]:
        def handler(tx: Any, args: Any, kwargs: Any) -> Any:
            values = [variable.get_real_python_backed_value() for variable in args]
            # What is compared with None is known by its type, which Dynamo guards by itself.
            if all(value is not None for value in values) and any(
                isinstance(value, classes) for value in values
            ):
                for variable in args:
                    if variable.source is not None:
                        guard = variable.source.make_guard(GuardBuilder.ID_MATCH)
                        install_guard(guard)
            return compare(tx, args, kwargs)

        return handler

    for name in ("is", "is not"):
        compare_op_handlers[name] = guarded(compare_op_handlers[name])


def guard_aliases(classes: tuple[type, ...]) -> None:
    """Have compiled functions notice when what was one object under two names is two.

    Dynamo makes one variable of them, and guards only one name if the other has another scope, as
    an argument and a global have.
    """
    build = VariableBuilder.__call__

    def guarded(builder: Any, value: Any) -> Any:
        if isinstance(value, classes) and value in builder.tx.output.side_effects:
            install_guard(builder.source.make_guard(GuardBuilder.ID_MATCH))
        return build(builder, value)

    VariableBuilder.__call__ = guarded  # type: ignore[method-assign, assignment]


def look_into_frozen_objects() -> None:
    """Have `in`, `index` and the like compare frozen dataclasses as their `==` does.

    Dynamo tries whether all that is compared is constant. Such an object says that it is none by
    an error that Dynamo does not expect there.
    """
    as_constant = FrozenDataClassVariable.as_python_constant

    def as_python_constant(variable: Any) -> object:
        try:
            return as_constant(variable)
        except AsPythonConstantNotImplementedError:
            raise
        except NotImplementedError as error:
            raise AsPythonConstantNotImplementedError(variable, str(error)) from error

    FrozenDataClassVariable.as_python_constant = as_python_constant  # type: ignore[method-assign, assignment]


def guard_callables(function: Callable[..., Any]) -> None:
    """Have compiled functions notice when something else that can be called is given to a function
    of which the result is a constant. Dynamo guards functions by their code, which is the same for
    all that one decorator made, and some not at all."""
    invoke = functions.invoke_and_store_as_constant

    def guarded(tx: Any, called: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if called is function:
            for variable in args:
                _guard_callables_in(variable)
        return invoke(tx, called, name, args, kwargs)

    functions.invoke_and_store_as_constant = guarded  # type: ignore[assignment]


def _guard_callables_in(variable: Any) -> None:
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    if isinstance(variable, TupleVariable):
        for item in variable.items:
            _guard_callables_in(item)
    elif isinstance(variable, WrapperUserFunctionVariable):
        _guard_callable(variable.source, variable.wrapper_obj)
    elif not isinstance(variable, UserDefinedObjectVariable) and variable.is_python_constant():
        value = variable.as_python_constant()
        if callable(value):
            _guard_callable(variable.source, value)


def _guard_callable(source: Any, value: Any) -> None:
    if source is None:
        return  # The compiled function makes it itself, always the same way.
    bound = isinstance(value, BuiltinMethodType | MethodWrapperType)
    install_guard(source.make_guard(_EQUAL_METHOD if bound else GuardBuilder.ID_MATCH))


def _EQUAL_METHOD(builder: Any, guard: Any) -> None:
    """Methods of built-in types are made anew each time that one is asked for. They are equal if
    their objects are the same."""
    method = builder.get(guard)

    def is_equal(value: Any) -> bool:
        return type(value) is type(method) and bool(value == method)

    builder.get_guard_manager(guard).add_lambda_guard(
        is_equal,
        get_verbose_code_parts(f"{builder.arg_ref(guard)} == {method!r}", guard),
        guard.user_stack,
    )


def guard_signs_of_zero() -> None:
    """Have compiled functions notice when a float that was 0.0 is -0.0, which is equal to it but
    not the same: a remote function may divide by it."""
    match = GuardBuilder.EQUALS_MATCH

    def guarded(builder: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        match(builder, guard, *args, **kwargs)
        zero = builder.get(guard)
        if type(zero) is float and zero == 0:
            sign = math.copysign(1, zero)

            def has_that_sign(value: Any) -> bool:
                return math.copysign(1, value) == sign

            builder.get_guard_manager(guard).add_lambda_guard(
                has_that_sign,
                get_verbose_code_parts(f"the sign of {builder.arg_ref(guard)} is {sign}", guard),
                guard.user_stack,
            )

    functools.update_wrapper(guarded, match)
    GuardBuilder.EQUALS_MATCH = guarded  # type: ignore[method-assign]


def guard_empty_hooks(concerns: Callable[[CodeType], bool]) -> None:
    """Have compiled functions notice when a module gets its first hook, if their code concerns us.
    Torch leaves that guard out (`skip_nnmodule_hook_guards`), and calls it unsafe."""
    skipped = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT

    def guarded(builder: Any, guard: Any) -> None:
        if concerns(builder.f_code):
            builder.SEQUENCE_LENGTH(guard)
        else:
            skipped(builder, guard)

    functools.update_wrapper(guarded, skipped)
    GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = guarded  # type: ignore[method-assign]


_HOOKS_OF_ALL_MODULES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def guard_hooks_of_all_modules() -> None:
    """Have the function that is being traced notice when hooks of all modules come or go. Torch
    guards the types of their tables only. To be called while Dynamo traces."""
    tables = InstructionTranslator.current_tx().import_source(nn.Module.__module__)
    for name in _HOOKS_OF_ALL_MODULES:
        install_guard(AttrSource(tables, name).make_guard(GuardBuilder.SEQUENCE_LENGTH))


def guard_keys(attributes: Mapping[type, Sequence[str]]) -> None:
    """Have compiled functions notice when another object of these classes is used as a key: one of
    which any of the attributes differs."""

    def guard(variable: Any) -> None:
        if variable.source is None:
            return
        for path in attributes.get(type(variable.value), ()):
            source = functools.reduce(AttrSource, path.split("."), variable.source)
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))

    def guarded(hash_of: Callable[..., Any]) -> Callable[..., Any]:
        def hash_impl(variable: Any, tx: Any) -> Any:
            guard(variable)
            return hash_of(variable, tx)

        return hash_impl

    kinds: tuple[Any, ...] = (UserDefinedObjectVariable, FrozenDataClassVariable)
    for kind in kinds:
        kind.hash_impl = guarded(kind.hash_impl)
