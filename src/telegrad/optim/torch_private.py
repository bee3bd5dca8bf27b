"""What torch does not offer in public and this room needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

_F = TypeVar("_F", bound=Callable[..., Any])


def announced_if_anyone_listens(step: _F) -> _F:
    """Run the hooks of a step, and tell the profiler of it, only where there are any.

    Torch wraps the `step` of every optimizer for that, unless it is marked as wrapped already. What
    the wrapper does for nobody takes longer than our own step takes to leave.
    """
    announced = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def stepping(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _is_listened_to(self):
            return announced(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    cast(Any, stepping).hooked = True
    return cast(_F, stepping)


_ANNOUNCING = Optimizer.profile_hook_step(lambda self: None).__code__
_CHOOSING_GRAD_MODE = torch_optimizer._use_grad_for_differentiable(lambda self: None).__code__


def step_quietly(optimizer: Optimizer) -> None:
    """`optimizer.step()`, without torch's wrappers around it where nobody listens.

    The outer one runs hooks and tells the profiler; the inner one, which most optimizers have, sets
    the grad mode and tells Dynamo, which does not look here, to stop. A step that anyone else has
    wrapped, or has put into the object, is left as it is.
    """
    step: Any = type(optimizer).step
    is_torchs = getattr(step, "__code__", None) is _ANNOUNCING and "step" not in vars(optimizer)
    if not is_torchs or _is_listened_to(optimizer):
        optimizer.step()
        return
    inner = step.__wrapped__
    if getattr(inner, "__code__", None) is not _CHOOSING_GRAD_MODE:
        inner(optimizer)
        return
    mode = torch.is_grad_enabled()
    torch._C._set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        inner.__wrapped__(optimizer)
    finally:
        torch._C._set_grad_enabled(mode)


def _is_listened_to(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def has_hooks_before_step(optimizer: Optimizer) -> bool:
    """Hooks that may look at the gradients of a step, or have them clipped."""
    return bool(optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)


def run_before_saving(optimizer: Optimizer) -> None:
    """The hooks of `register_state_dict_pre_hook`."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def run_after_saving(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The hooks of `register_state_dict_post_hook`: what they make of a state."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state = _or_same(hook(optimizer, state), state)
    return state


def run_before_loading(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The hooks of `register_load_state_dict_pre_hook`: what they make of a copy of a state."""
    state = dict(state)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state = _or_same(hook(optimizer, state), state)
    return state


def run_after_loading(optimizer: Optimizer) -> None:
    """The hooks of `register_load_state_dict_post_hook`."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _or_same(made: dict[str, Any] | None, state: dict[str, Any]) -> dict[str, Any]:
    return state if made is None else made
