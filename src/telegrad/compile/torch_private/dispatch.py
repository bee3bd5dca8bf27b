"""Relied upon: an operator holds the function that dispatches it, and calls that function; kernels
run below autograd by dispatch keys that are excluded for their thread; a graph that AOTAutograd has
differentiated runs without grad mode, whatever mode its code asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


class above_autograd:
    """Inside of a kernel: let operations be recorded by autograd as they are outside of it.

    A kernel of ours runs what comes for others meanwhile, and makes graph nodes of its own.
    """

    __slots__ = ("_excluded",)

    def __enter__(self) -> None:
        self._excluded = [key for key in _AUTOGRAD if _is_excluded(key)]
        for key in self._excluded:
            _set_excluded(key, False)

    def __exit__(self, *_: object) -> None:
        for key in self._excluded:
            _set_excluded(key, True)


set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""What `torch.set_grad_enabled` does, without the object that undoes it."""


def differentiated_by_engine() -> bool:
    """Inside of a kernel of a traced backward, which was traced with grad mode on: whether autograd
    itself runs the operations around it, and with them the hooks of tensors. Otherwise they were
    differentiated when they were compiled."""
    return torch.is_grad_enabled()


class _Straight:
    """Stands for the function that dispatches an operator, and leaves it out where it adds nothing.

    That is when a compiled function runs: nothing traces, fakes, profiles or differentiates. The
    way through the dispatcher and back to Python costs more than many a kernel.
    """

    __slots__ = ("_dispatch", "_kernel", "_place")

    def __init__(
        self, dispatch: Callable[..., Any], kernel: Callable[..., Any], place: int
    ) -> None:
        self._dispatch = dispatch
        self._kernel = kernel
        self._place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or _is_grad_enabled()
            or _modes_of_dispatch()
            or _is_profiling()
            or _is_excluded(_AUTOGRAD[0])
            or type(args[self._place]) is not Tensor
        ):
            return self._dispatch(*args, **kwargs)
        return self._kernel(*args)

    def __hash__(self) -> int:
        return hash(self._dispatch)

    def __eq__(self, other: object) -> bool:
        return self is other or self._dispatch == other


_is_grad_enabled = torch.is_grad_enabled
_modes_of_dispatch = torch._C._len_torch_dispatch_stack
_is_profiling = torch._C._autograd._profiler_enabled


def go_straight(operator: Any, kernel: Callable[..., Any], place: int) -> None:
    """Have graphs call the kernel of an operator themselves. Its argument at `place` is a tensor,
    by which those that only stand for others are known."""
    operator._op = _Straight(operator._op, kernel, place)
