"""What the optimizers rely on of torch that is not public."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from telegrad.optim.torch_private import step_quietly


def made(kind: type[Optimizer], **options: Any) -> tuple[torch.Tensor, Optimizer]:
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    return parameter, kind([parameter], lr=0.1, **options)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_quiet_step_is_a_step(kind: type[Optimizer]) -> None:
    quiet, optimizer = made(kind)
    step_quietly(optimizer)
    expected, twin = made(kind)
    twin.step()
    torch.testing.assert_close(quiet, expected, rtol=0, atol=0)


def test_torch_is_still_wrapping_steps_in_the_way_that_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, optimizer = made(SGD)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)
    step_quietly(optimizer)
    with pytest.raises(TypeError):
        optimizer.step()


@pytest.mark.parametrize("kind", [SGD, Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_torch_is_still_choosing_the_grad_mode_in_the_way_that_is_left_out(
    kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = made(kind)
    monkeypatch.setattr(torch, "set_grad_enabled", None)
    step_quietly(optimizer)
    with pytest.raises(TypeError):
        optimizer.step()


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("differentiable", [True, False])
def test_a_step_has_the_grad_mode_that_it_asks_for_and_leaves_the_callers(
    mode: bool, differentiable: bool
) -> None:
    seen = []

    class Seeing(SGD):
        def _init_group(self, *args: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return super()._init_group(*args)

    leaf, optimizer = made(SGD, differentiable=differentiable)
    optimizer.__class__ = Seeing
    leaf.grad = None  # A leaf that needs gradient cannot be changed in place.
    with torch.set_grad_enabled(mode):
        step_quietly(optimizer)
        assert torch.is_grad_enabled() is mode
    assert seen == [differentiable]


def test_after_a_step_that_fails_the_grad_mode_is_the_callers() -> None:
    _, optimizer = made(SGD)
    optimizer.param_groups[0].pop("momentum")
    with pytest.raises(KeyError):
        step_quietly(optimizer)
    assert torch.is_grad_enabled()


def test_hooks_are_heard() -> None:
    _, optimizer = made(SGD)
    heard = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    step_quietly(optimizer)
    assert heard == ["before", "after"]


def test_a_profiler_hears_of_it() -> None:
    _, optimizer = made(SGD)
    with torch.autograd.profiler.profile() as profile:
        step_quietly(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.function_events}


def test_what_others_have_wrapped_around_a_step_runs() -> None:
    made(SGD)  # Torch wraps the step of a class when the first of it is made.
    ran = []

    class Counting(SGD):
        @functools.wraps(SGD.step)
        def step(self, *args: Any, **kwargs: Any) -> Any:
            ran.append(1)
            return super().step(*args, **kwargs)

    _, optimizer = made(Counting)
    step_quietly(optimizer)
    assert ran == [1]
    _, optimizer = made(SGD)
    StepLR(optimizer, 1)  # It puts a step of its own into the object.
    step_quietly(optimizer)
    assert optimizer._opt_called
