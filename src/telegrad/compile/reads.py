"""Process groups are guarded by what a compiled function reads of them, where it reads it.

Torch folds the size, the rank or the members of a process group into constants, and guards by its
type alone a group that is passed as an argument: with another one, the constants of the first are
used in silence. To guard all of a group whenever it is seen would be right, but compile again for a
group that is only passed on, or of which only the backend is asked.

So each place where Dynamo reads a group puts a guard on the outcome of that very read. Where it is
not known what is read, all of it is guarded. What must never happen: a read without a guard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._dynamo.guards import get_verbose_code_parts, install_guard
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.script_object import TorchScriptObjectVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributed import distributed_c10d as c10d

Read = Callable[[dist.ProcessGroup], Any]

_ASKING = (
    dist.get_rank,
    dist.get_world_size,
    dist.get_process_group_ranks,
    c10d._get_group_tag,
    c10d._rank_not_in_group,
    dist.get_backend,
)
"""Functions that do nothing but say something of a group. Torch folds some of them, and traces
others through tables with all groups of the process."""


class _Thread(threading.local):
    """What is being read of the groups that Dynamo looks at."""

    read: Read | None = None
    known = False


_thread = _Thread()
enabled = True
"""Whether guards are put; not for tests that show what torch does by itself."""


def everything(group: dist.ProcessGroup) -> list[object]:
    """All that is folded of a process group."""
    world = group is dist.group.WORLD
    return [group.group_name, group.name(), group.size(), group.rank(), world, _members(group)]


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()  # A group that was destroyed.


def _group_of(variable: Any) -> dist.ProcessGroup | None:
    variable = _realized(variable)
    if type(variable) is not TorchScriptObjectVariable:
        return None
    value = getattr(variable.value, "real_obj", variable.value)
    return value if isinstance(value, dist.ProcessGroup) else None


def _realized(variable: Any) -> Any:
    """What stands for a group, in the place of what will once it is looked at."""
    if isinstance(variable, LazyVariableTracker) and (
        variable.is_realized() or isinstance(variable.peek_value(), dist.ProcessGroup)
    ):
        return variable.realize()
    return variable


def _guard(variable: Any, read: Read) -> None:
    """Have the graph serve while a read of the group comes out as it does now."""
    variable = _realized(variable)
    group = _group_of(variable)
    if group is None or variable.source is None or not enabled:
        return
    outcome = read(group)

    def comes_out_the_same(value: Any) -> bool:
        return bool(read(getattr(value, "real_obj", value)) == outcome)

    def PROCESS_GROUP_READ(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(
            comes_out_the_same,
            get_verbose_code_parts(f"process group {builder.arg_ref(guard)}: {outcome!r}", guard),
            guard.user_stack,
        )

    install_guard(variable.source.make_guard(PROCESS_GROUP_READ))


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


def guard_reads() -> None:
    """Put the guards into Dynamo. To be called once."""

    def as_constant(original: Any) -> Any:
        def as_python_constant(self: Any) -> Any:
            if not _thread.known:
                _guard(self, everything)
            elif _thread.read is not None:
                _guard(self, _thread.read)
            return original(self)

        return as_python_constant

    def as_input(original: Any) -> Any:
        def as_proxy(self: Any) -> Any:
            if not _thread.known:
                _guard(self, everything)
            return original(self)

        return as_proxy

    def attribute(original: Any) -> Any:
        def var_getattr(self: Any, tx: Any, name: str) -> Any:
            if _group_of(self) is None:
                return original(self, tx, name)
            with _reading(None):
                return original(self, tx, name)

        return var_getattr

    def method(original: Any) -> Any:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if _group_of(self) is None:
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
            groups = [v for v in (*args, *kwargs.values()) if _group_of(v) is not None]
            if not groups:
                return original(self, tx, args, kwargs)
            asks = self.value in _ASKING and len(args) + len(kwargs) == 1
            for variable in groups:
                _guard(variable, self.value if asks else everything)
            with _reading(None):
                return original(self, tx, args, kwargs)

        return call_function

    def written_function(original: Any) -> Any:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            group = _group_of(args[0]) if len(args) == 1 and not kwargs else None
            if group is None or self.fn not in _ASKING or not enabled:
                return original(self, tx, args, kwargs)
            _guard(args[0], self.fn)
            return VariableTracker.build(tx, self.fn(group))

        return call_function

    def comparison(original: Any) -> Any:
        def richcompare_impl(self: Any, tx: Any, other: Any, op: str) -> Any:
            if _group_of(self) is None:
                return original(self, tx, other, op)
            _guard_comparison(self, other)
            with _reading(None):
                return original(self, tx, other, op)

        return richcompare_impl

    def same(original: Any) -> Any:
        def compare(tx: Any, args: Any, kwargs: Any) -> Any:
            groups = [variable for variable in args if _group_of(variable) is not None]
            if not groups:
                return original(tx, args, kwargs)
            _guard_comparison(*args)
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


def _is_world(group: dist.ProcessGroup) -> bool:
    return group is dist.group.WORLD


def _guard_comparison(one: Any, other: Any) -> None:
    """Groups are equal if they are the same. One that is compared with the world is asked whether
    it is that; one that is compared with something that is no group differs whatever it is."""
    for variable, partner in ((one, other), (other, one)):
        if _group_of(variable) is None:
            continue
        if isinstance(partner, ConstantVariable):
            continue
        partners = _group_of(partner)
        if partners is None:
            continue
        _guard(variable, _is_world if _is_world(partners) else everything)
