"""What torch does not offer in public and this room needs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module is more than its `forward`, as torch asks itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )
