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
from telegrad.nn.torch_private import has_hooks
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.relays import MOST_STAGES


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
        for is_remote, run in groupby(self, _is_remote):
            if is_remote:
                input = _passed_through(list(run), input)
            else:
                for module in run:
                    input = module(input)
        return input


def _is_remote(module: nn.Module) -> bool:
    """A subclass that computes otherwise than on its worker alone is called as any module."""
    return isinstance(module, RemoteModule) and type(module).forward is RemoteModule.forward


def _passed_through(modules: Sequence[Any], value: Any) -> Any:
    last = modules[-1]
    if 1 < len(modules) <= MOST_STAGES and type(value) is torch.Tensor and ambient() is None:
        stages = _as_relay(modules)
        if stages is not None:
            name = f"a RemoteSequential of {len(modules)} modules"
            node = last.rref._node
            bound = _longest(modules, node.timeout)
            return node.relays.run(stages, "forward_plainly", value, bound, name)
    for module in modules[:-1]:
        value = module.lazy(value)
    return last(value)


def _as_relay(modules: Sequence[RemoteModule]) -> list[ReferenceId] | None:
    """The stages of a relay; None if not all are elsewhere, or if somebody here is to see what the
    last one is given."""
    stages = []
    is_any_here = False
    for module in modules:
        rref = module.rref
        rref._check_usable("a call of the module")
        is_any_here |= rref.is_owner()
        stages.append(rref._reference)
    return None if is_any_here or has_hooks(modules[-1]) else stages


def _longest(modules: Sequence[RemoteModule], of_job: float) -> float:
    """The longest of their bounds; 0 is none, and so the longest of all."""
    bounds = [of_job if module.timeout is None else module.timeout for module in modules]
    return 0 if 0 in bounds else max(bounds)
