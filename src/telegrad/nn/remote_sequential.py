"""Modules on several workers, one after the other, called as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from telegrad.nn.ambient import ambient
from telegrad.nn.remote_module import RemoteModule


class RemoteSequential(nn.Sequential):
    """As `nn.Sequential`, for modules that are remote, all or some.

        model = RemoteSequential(encoder, decoder)   # RemoteModules on worker1 and worker2
        y = model(x)                                 # here -> worker1 -> worker2 -> here

    What one remote module returns goes straight to the worker of the next, and its gradient
    straight back; only what the last one returns comes here. Local modules among them run here.
    It is what `decoder(encoder.lazy(x))` computes, with fewer messages: no worker has to ask
    another for what it needs. As with `lazy`, hooks of those RemoteModules whose result stays
    elsewhere do not run here.

    A call is bounded by the longest `timeout` of the modules that it passes through.
    """

    def forward(self, input: Any) -> Any:
        for is_remote, run in groupby(self, lambda module: isinstance(module, RemoteModule)):
            if is_remote:
                input = _passed_through(list(run), input)
            else:
                for module in run:
                    input = module(input)
        return input


def _passed_through(modules: Sequence[Any], value: Any) -> Any:
    if is_dynamo_compiling():
        for module in modules:
            value = module(value)
        return value
    last = modules[-1]
    is_plain = type(value) is torch.Tensor and ambient() is None
    if len(modules) > 1 and is_plain and _are_elsewhere(modules):
        stages = [module.rref._reference for module in modules]
        name = f"a RemoteSequential of {len(modules)} modules"
        relays = last.rref._node.relays
        return relays.run(stages, "forward_plainly", value, _longest(modules), name)
    for module in modules[:-1]:
        value = module.lazy(value)
    return last(value)


def _are_elsewhere(modules: Sequence[RemoteModule]) -> bool:
    for module in modules:
        module.rref._check_usable("a call of the module")
    return not any(module.rref.is_owner() for module in modules)


def _longest(modules: Sequence[RemoteModule]) -> float | None:
    """None is the bound of the job, and 0 is none."""
    bounds = {module.timeout for module in modules}
    return None if None in bounds else 0 if 0 in bounds else max(bounds, key=float)  # type: ignore[arg-type]
