"""What this room relies upon of torch without torch promising it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as torch_module

from telegrad.nn.torch_private import has_hooks


def test_a_module_without_hooks_has_none() -> None:
    assert not has_hooks(nn.Linear(1, 1))


OF_MODULES = [
    nn.Module.register_forward_pre_hook,
    nn.Module.register_forward_hook,
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_full_backward_hook,
]
GLOBAL = [
    torch_module.register_module_forward_pre_hook,
    torch_module.register_module_forward_hook,
    torch_module.register_module_full_backward_pre_hook,
    torch_module.register_module_full_backward_hook,
]


@pytest.mark.parametrize("register", OF_MODULES, ids=lambda each: each.__name__)
def test_each_kind_of_hook_of_a_module_is_found(register: Callable[..., Any]) -> None:
    module = nn.Linear(1, 1)
    handle = register(module, lambda *_: None)
    assert has_hooks(module)
    handle.remove()
    assert not has_hooks(module)


@pytest.mark.parametrize("register", GLOBAL, ids=lambda each: each.__name__)
def test_each_kind_of_hook_of_all_modules_is_found(register: Callable[..., Any]) -> None:
    handle = register(lambda *_: None)
    try:
        assert has_hooks(nn.Linear(1, 1))
    finally:
        handle.remove()
