"""Relied upon: Dynamo asks a variable of an opaque object for its constant, its proxy, an
attribute, the result of a method or of a comparison by one method each; it traces calls of torch's
functions and of others by one method each; it takes functions as guards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._dynamo.guards import get_verbose_code_parts, install_guard
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.script_object import TorchScriptObjectVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributed import distributed_c10d as c10d

Read = Callable[[Any], Any]

ASKING_GROUPS: tuple[Callable[..., Any], ...] = (c10d._get_group_tag, c10d._rank_not_in_group)
"""What torch's own code, which Dynamo traces, asks of process groups."""


@dataclass(slots=True, eq=False)
class Reading:
    """What may be read of the objects of a class, and how that is guarded."""

    cls: type
    everything: Read
    """All that torch folds of one."""
    asking: Sequence[Callable[..., Any]]
    """Functions that do nothing but say something of one."""
    compared_with: Callable[[Any], Read]
    """What is read of an object by comparing it with another one."""
    enabled: bool = True


class _Thread(threading.local):
    """What is being read of the objects that Dynamo looks at."""

    read: Read | None = None
    known = False


_thread = _Thread()


def _object_of(variable: Any, reading: Reading) -> Any:
    variable = _realized(variable, reading)
    if type(variable) is not TorchScriptObjectVariable:
        return None
    value = getattr(variable.value, "real_obj", variable.value)
    return value if isinstance(value, reading.cls) else None


def _realized(variable: Any, reading: Reading) -> Any:
    """What stands for an object, in the place of what will once it is looked at."""
    if isinstance(variable, LazyVariableTracker) and (
        variable.is_realized() or isinstance(variable.peek_value(), reading.cls)
    ):
        return variable.realize()
    return variable


def _guard(variable: Any, read: Read, reading: Reading) -> None:
    """Have the graph serve while a read of the object comes out as it does now."""
    variable = _realized(variable, reading)
    value = _object_of(variable, reading)
    if value is None or variable.source is None or not reading.enabled:
        return
    outcome = read(value)

    def comes_out_the_same(value: Any) -> bool:
        return bool(read(getattr(value, "real_obj", value)) == outcome)

    def OPAQUE_OBJECT_READ(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(
            comes_out_the_same,
            get_verbose_code_parts(f"read of {builder.arg_ref(guard)}: {outcome!r}", guard),
            guard.user_stack,
        )

    install_guard(variable.source.make_guard(OPAQUE_OBJECT_READ))


@contextmanager
def _reading(read: Read | None) -> Iterator[None]:
    """In this block it is known what is read; None: what has a guard of its own."""
    outer = _thread.read, _thread.known
    _thread.read, _thread.known = read, True
    try:
        yield
    finally:
        _thread.read, _thread.known = outer


def _constants(variables: Sequence[Any]) -> list[Any] | None:
    try:
        return [variable.as_python_constant() for variable in variables]
    except NotImplementedError:
        return None


def _replace(cls: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(cls, name, make(getattr(cls, name)))


def guard_reads(reading: Reading) -> None:
    """Put the guards into Dynamo. To be called once."""
    everything = reading.everything

    def group_of(variable: Any) -> Any:
        return _object_of(variable, reading)

    def guard(variable: Any, read: Read) -> None:
        _guard(variable, read, reading)

    def guard_comparison(one: Any, other: Any) -> None:
        for variable, partner in ((one, other), (other, one)):
            if group_of(variable) is None or isinstance(partner, ConstantVariable):
                continue
            if group_of(partner) is not None:
                guard(variable, reading.compared_with(group_of(partner)))

    def as_constant(original: Any) -> Any:
        def as_python_constant(self: Any) -> Any:
            if not _thread.known:
                guard(self, everything)
            elif _thread.read is not None:
                guard(self, _thread.read)
            return original(self)

        return as_python_constant

    def as_input(original: Any) -> Any:
        def as_proxy(self: Any) -> Any:
            if not _thread.known:
                guard(self, everything)
            return original(self)

        return as_proxy

    def attribute(original: Any) -> Any:
        def var_getattr(self: Any, tx: Any, name: str) -> Any:
            if group_of(self) is None:
                return original(self, tx, name)
            with _reading(None):
                return original(self, tx, name)

        return var_getattr

    def method(original: Any) -> Any:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if group_of(self) is None:
                return original(self, tx, name, args, kwargs)
            given, named = _constants(list(args)), _constants(list(kwargs.values()))
            read: Read = everything
            if given is not None and named is not None:
                names = dict(zip(kwargs, named, strict=True))

                def read(group: Any) -> Any:
                    return getattr(group, name)(*given, **names)

            with _reading(read):
                return original(self, tx, name, args, kwargs)

        return call_method

    def torch_function(original: Any) -> Any:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            groups = [v for v in (*args, *kwargs.values()) if group_of(v) is not None]
            if not groups:
                return original(self, tx, args, kwargs)
            asks = self.value in reading.asking and len(args) + len(kwargs) == 1
            for variable in groups:
                guard(variable, self.value if asks else everything)
            with _reading(None):
                return original(self, tx, args, kwargs)

        return call_function

    def written_function(original: Any) -> Any:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            group = group_of(args[0]) if len(args) == 1 and not kwargs else None
            if group is None or self.fn not in reading.asking or not reading.enabled:
                return original(self, tx, args, kwargs)
            guard(args[0], self.fn)
            return VariableTracker.build(tx, self.fn(group))

        return call_function

    def comparison(original: Any) -> Any:
        def richcompare_impl(self: Any, tx: Any, other: Any, op: str) -> Any:
            if group_of(self) is None:
                return original(self, tx, other, op)
            guard_comparison(self, other)
            with _reading(None):
                return original(self, tx, other, op)

        return richcompare_impl

    def same(original: Any) -> Any:
        def compare(tx: Any, args: Any, kwargs: Any) -> Any:
            groups = [variable for variable in args if group_of(variable) is not None]
            if not groups:
                return original(tx, args, kwargs)
            guard_comparison(*args)
            with _reading(None):
                return original(tx, args, kwargs)

        return compare

    _replace(TorchScriptObjectVariable, "as_python_constant", as_constant)
    _replace(TorchScriptObjectVariable, "as_proxy", as_input)
    _replace(TorchScriptObjectVariable, "var_getattr", attribute)
    _replace(TorchScriptObjectVariable, "call_method", method)
    _replace(TorchScriptObjectVariable, "richcompare_impl", comparison)
    _replace(TorchInGraphFunctionVariable, "call_function", torch_function)
    _replace(UserFunctionVariable, "call_function", written_function)
    for name in ("is", "is not"):
        compare_op_handlers[name] = same(compare_op_handlers[name])
