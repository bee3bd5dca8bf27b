"""Modules on several workers, one after the other, called as one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from telegrad.nn.ambient import ambient
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.torch_private import has_hooks
from telegrad.rpc.relays import MOST_STAGES, course_through

_reference_of = attrgetter("rref._reference")
_timeout_of = attrgetter("timeout")


class RemoteSequential(nn.Sequential):
    """As `nn.Sequential`, for modules that are remote, all or some.

        model = RemoteSequential(encoder, decoder)   # RemoteModules on worker1 and worker2
        y = model(x)                                 # here -> worker1 -> worker2 -> here

    What one remote module returns goes straight to the worker of the next, and its gradient
    straight back; only what the last one returns comes here. Local modules among them run here.
    It is what `decoder(encoder.lazy(x))` computes, with fewer messages: no worker has to ask
    another for what it needs. As with `lazy`, hooks of those RemoteModules whose result stays
    elsewhere do not run here; those of a last one do.

    A call is bounded by the longest `timeout` of the modules that it passes through.
    """

    def forward(self, input: Any) -> Any:
        if is_dynamo_compiling():
            return super().forward(input)  # type: ignore[no-untyped-call]
        row: list[RemoteModule] = []
        for module in self._modules.values():
            if type(module) is RemoteModule or _is_remote(module):
                row.append(module)
                continue
            if row:
                input = _passed_through(row, input)
                row = []
            input = module(input)
        return _passed_through(row, input) if row else input


def _is_remote(module: nn.Module | None) -> TypeGuard[RemoteModule]:
    """A subclass that computes otherwise than on its worker alone is called as any module."""
    return isinstance(module, RemoteModule) and type(module).forward is RemoteModule.forward


def _passed_through(modules: Sequence[RemoteModule], value: Any) -> Any:
    last = modules[-1]
    if (
        1 < len(modules) <= MOST_STAGES
        and type(value) is torch.Tensor
        and ambient() is None
        and not has_hooks(last)  # Somebody here is to see what the last one is given.
    ):
        for module in modules:
            module.rref._check_usable("a call of the module")
        node = last.rref._node
        course = course_through(tuple(map(_reference_of, modules)), "forward_plainly")
        if node.info.id not in course.owners:
            bound = _longest({*map(_timeout_of, modules)}, node.timeout)
            name = f"a RemoteSequential of {len(modules)} modules"
            return node.relays.run(course, value, bound, name)
    for module in modules[:-1]:
        value = module.lazy(value)
    return last(value)


def _longest(bounds: set[float | None], of_job: float) -> float:
    """The longest of the bounds of modules; 0 is none, and so the longest of all."""
    if None in bounds:
        bounds = bounds - {None} | {of_job}
    return 0 if 0 in bounds else max(bounds)  # type: ignore[type-var, return-value]
