"""A gradient that cannot be sent fails the pass like any other error; nobody waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from telegrad import rpc
from telegrad.autograd import api
from telegrad.rpc.errors import TelegradError
from telegrad.testing import simulate
from tests.autograd.conducted import leftovers

WORKERS = ("a", "b", "c")


class WithoutBytes(torch.autograd.Function):
    """Its gradient has a shape and nothing in it."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        with FakeTensorMode():
            return torch.empty(g.shape)


def along(x: Tensor, route: list[str], bad: bool) -> Tensor:
    if route:
        result: Tensor = rpc.rpc_sync(route[0], along, args=(x * 1, route[1:], bad))
        return result
    return WithoutBytes.apply(x) if bad else x * 2


def fails_at_the_end_of(route: list[str]) -> Tensor:
    return along(torch.ones(2, requires_grad=True), route, bad=True)


def fails_at_home_after(route: list[str]) -> Tensor:
    x = along(torch.ones(2, requires_grad=True), ["b"], bad=False)
    return along(WithoutBytes.apply(x), route, bad=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("route", [["b"], ["c"], ["b", "c"], ["b", "a", "c", "b"]])
@pytest.mark.parametrize("forward", [fails_at_the_end_of, fails_at_home_after])
def test_a_gradient_that_cannot_be_sent_fails_the_pass_everywhere(forward, route, seed) -> None:
    def main() -> list[int]:
        with api.context() as context_id:
            with pytest.raises(TelegradError, match=r"cannot send .*FakeTensor"):
                api.backward(context_id, [forward(route).sum()])
            x = torch.ones(2, requires_grad=True)
            api.backward(context_id, [along(x, route, bad=False).sum()])
            assert torch.equal(api.get_gradients(context_id)[x], torch.full((2,), 2.0))
            held = [rpc.rpc_sync(worker, leftovers) for worker in WORKERS]
            return [counts["num_current_backward_passes"] for counts in held]

    result = simulate(main, WORKERS, seed=seed, timeout=0)
    assert result.value == [0, 0, 0]
    assert result.leaks == {}
