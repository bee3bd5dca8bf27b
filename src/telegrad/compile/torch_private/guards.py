"""Relied upon:

* The record that torch keeps of the types `ProcessGroup` and `DeviceMesh` has a place for a guard
  function, and says which of their methods are folded or traced.
* Dynamo makes variables of objects by one method, and knows by then which it has seen.
* Dynamo looks up how to trace `is` and `is not` in a table, and asks one method of each kind of
  object for its hash when the object is used as a key.
* Dynamo guards a constant by one method of its guard builder, and takes functions as guards.
* Dynamo guards by one method that a module has no hooks, and knows then whose graph it guards.
* Hooks of all modules are in four tables beside `torch.nn.Module`, and Dynamo guards lengths.
* A guard by identity ends when its object does, so that no other can take its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator, compare_op_handlers
from torch._dynamo.variables.builder import VariableBuilder
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
