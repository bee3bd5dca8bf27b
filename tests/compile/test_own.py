"""Calls of a compiled function to its own worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.autograd import AutogradError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.compile import functions as f
from tests.compile.checks import BACKENDS, assert_same, compiled

pytestmark = pytest.mark.usefixtures("job")


def needs(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _overlapping(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).flatten().unfold(0, 3, 1), x.sum().expand(4, 3)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_to_oneself_is_differentiated(backend: str) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        later = rpc.rpc_async("main", f.doubled_in_place, (x, [x], y))
        here = rpc.rpc_sync("main", f.layer, (x * 2, y))
        both = rpc.rpc_sync("main", f.several, ({"x": here, "rest": (y, 3)},))
        return (both[0] * later.wait()).sum() + rpc.rpc_sync("worker1", f.layer, (here, x)).sum()

    def gradients(function: Any, x: Tensor) -> Any:
        with autograd.context() as context_id:
            loss = function(x, y)
            for _ in range(2):
                autograd.backward(context_id, [loss], retain_graph=True, timeout=20)
            found = autograd.get_gradients(context_id)
            return [loss.detach(), found.get(x), found[y], found[f.WEIGHT]]

    run, counter = compiled(step, backend)
    y = needs(4, 3)
    for x in (needs(4, 3), torch.ones(4, 3)):
        assert_same(gradients(step, x), gradients(run, x))
    assert counter.frame_count == 2


def test_a_call_to_oneself_in_a_step_that_differentiates_itself() -> None:
    module = RemoteModule("main", nn.Linear, (3, 3))

    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = module(rpc.rpc_sync("main", f.layer, (x, x))).pow(2).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.detach()

    start = f.WEIGHT.detach().clone()
    parameters = [*module.parameters(), rpc.RRef(f.WEIGHT)]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    x, ends = torch.ones(2, 3), []
    for function in (step, compiled(step, "aot_eager")[0]):
        with torch.no_grad():
            f.WEIGHT.copy_(start)
            module.apply(_fill)
        ends.append([function(x) for _ in range(3)])
    with torch.no_grad():
        f.WEIGHT.copy_(start)
    assert_same(*ends)
    assert ends[0][0] > ends[0][-1]


def test_a_call_to_oneself_that_makes_another_call_says_so() -> None:
    run, _ = compiled(lambda x: rpc.rpc_sync("main", f.nested, ("worker1", x)).sum(), "aot_eager")
    with autograd.context(), pytest.raises(AutogradError, match=r"its own worker, where a call is"):
        run(needs(4, 3))
    make, _ = compiled(lambda x: rpc.remote("main", f.layer, (x, x)), "aot_eager")
    with (
        autograd.context(),
        pytest.raises(AutogradError, match=r"a reference .* on its own worker"),
    ):
        make(needs(4, 3))


@pytest.mark.parametrize("worker", ["main", "worker1"])
def test_elements_of_a_result_may_share_memory(worker: str) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return rpc.rpc_sync(worker, _overlapping, (x,))

    def gradients(function: Any) -> Any:
        with autograd.context() as context_id:
            outputs = function(x)
            autograd.backward(context_id, [sum(output.pow(2).sum() for output in outputs)])
            return [*outputs, autograd.get_gradients(context_id)[x]]

    x = needs(4, 3)
    eager, ours = gradients(step), gradients(compiled(step, "aot_eager")[0])
    assert_same(eager, ours)
    assert [each.stride() for each in eager] == [each.stride() for each in ours]
