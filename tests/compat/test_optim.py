"""Torch's DistributedOptimizer on telegrad: the steps are stock's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.optim.utils import functional_optim_map

SLOPE = torch.tensor([1.0, -2.0])


def stepped(rpc: ModuleType, cls: Any, **options: Any) -> torch.Tensor:
    """A parameter after three steps of an optimizer that knows no more than these options."""
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.optim import DistributedOptimizer

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(cls, [rpc.RRef(weight)], **options)
    for _ in range(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [(weight * SLOPE).sum()])
            optimizer.step(context_id)
    assert weight.grad is None
    return weight.detach()


@pytest.mark.parametrize("cls", functional_optim_map, ids=lambda cls: cls.__name__)
def test_defaults_are_those_of_what_stock_runs(alone: ModuleType, cls: Any) -> None:
    weight = torch.ones(2)
    functional = functional_optim_map[cls]([weight])
    for _ in range(3):
        functional.step([SLOPE])
    assert torch.equal(stepped(alone, cls), weight)


def test_sgd_without_lr_steps_by_a_hundredth(alone: ModuleType) -> None:
    assert torch.allclose(stepped(alone, torch.optim.SGD), torch.tensor([0.97, 1.06]))


def test_arguments_that_stock_takes_are_taken(alone: ModuleType) -> None:
    weight = stepped(alone, torch.optim.SGD, lr=0.1, nesterov=True)
    assert torch.allclose(weight, torch.tensor([0.7, 1.6]))


def test_an_optimizer_that_stock_does_not_compile_runs_as_it_is(alone: ModuleType) -> None:
    from torch.distributed.optim import DistributedOptimizer

    weight = torch.nn.Parameter(torch.ones(2))
    made = DistributedOptimizer(torch.optim.NAdam, [alone.RRef(weight)])
    assert isinstance(made.remote_optimizers[0].local_value().optim, torch.optim.NAdam)


def test_what_has_no_gradient_in_a_context_is_not_stepped_by_that_of_another(
    alone: ModuleType,
) -> None:
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.optim import DistributedOptimizer

    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [alone.RRef(first), alone.RRef(second)], lr=0.1
    )
    for weight in (first, second):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [weight.sum()])
            optimizer.step(context_id)
    assert first.tolist() == second.tolist()
