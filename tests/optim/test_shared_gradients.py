"""What leaves for another worker is the gradient, also where a step changes a tensor in place that
the engine gave to a parameter and to that worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.optim.test_backward_and_step import brief

__all__ = ["brief"]

pytestmark = pytest.mark.usefixtures("workers")


class Shift(nn.Module):
    """Both that are added up have the same gradient, which is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class ChangesGradients(optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(100)
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (ChangesGradients, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ],
)
def test_a_step_does_not_change_the_gradient_that_goes_to_another_worker(
    optimizer_class: Any, options: Any
) -> None:
    shift = RemoteModule("worker1", Shift)
    optimizer = DistributedOptimizer(optimizer_class, shift, **options)
    x = torch.ones(4, requires_grad=True)
    for _ in range(4):
        with autograd.context() as context:
            optimizer.backward_and_step(context, [shift(x).sum()])
            assert autograd.get_gradients(context)[x].tolist() == [1.0] * 4
