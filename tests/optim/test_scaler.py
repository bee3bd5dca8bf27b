"""Mixed precision: autocast follows calls, and the scaler's decision is one for all workers."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn, optim

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, GradScaler, OptimizerError, StepFailed
from tests.optim.failing import FailsOnOrder, set_failing
from tests.optim.models import Local, Spread, batches, loss_of, stepped_once

pytestmark = pytest.mark.usefixtures("workers")


class Overflow(torch.autograd.Function):
    """Passes on what it gets; the gradient becomes infinite."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, float("inf"))


class OverflowsInTheMiddle(Spread):
    def forward(self, x: Tensor) -> Tensor:
        # Only the worker of the first layer will see infinite gradients.
        first = self.first(x)
        return self.last(self.middle(x[:, :5])) + 0 * Overflow.apply(first).sum()  # type: ignore[no-untyped-call]


def test_scaled_training_under_autocast_equals_torch_in_one_process() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1, momentum=0.9)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler = GradScaler(init_scale=1024.0, growth_interval=2)
    for batch in batches(5):
        plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(local, batch)
        torch_scaler.scale(loss).backward()
        torch_scaler.unscale_(plain)
        expected = torch.nn.utils.clip_grad_norm_(local.parameters(), 0.5)
        torch_scaler.step(plain)
        torch_scaler.update()
        with autograd.context() as context_id:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(spread, batch)
            autograd.backward(context_id, [scaler.scale(loss)])
            scaler.unscale_(distributed, context_id)
            norm = distributed.clip_grad_norm_(context_id, 0.5)
            assert scaler.step(distributed, context_id)
            scaler.update()
        torch.testing.assert_close(norm, expected)
        assert scaler.get_scale() == torch_scaler.get_scale()
    torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))
    assert scaler.state_dict() == torch_scaler.state_dict()


def test_autocast_of_the_caller_reaches_the_worker() -> None:
    spread = Spread()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert spread.first(torch.ones(2, 6)).dtype is torch.bfloat16
    assert spread.first(torch.ones(2, 6)).dtype is torch.float32


def test_an_infinity_on_one_worker_keeps_all_from_stepping() -> None:
    spread = OverflowsInTheMiddle()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    scaler = GradScaler(init_scale=8.0)
    before = copy.deepcopy(spread.state_dict())
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(loss_of(spread, batches(1)[0]))])
        assert not scaler.step(optimizer, context_id)
        scaler.update()
    torch.testing.assert_close(dict(spread.state_dict()), dict(before), rtol=0, atol=0)
    assert scaler.get_scale() == 4.0


def test_gradients_are_unscaled_once_per_update() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    scaler = GradScaler()
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(loss_of(spread, batches(1)[0]))])
        scaler.unscale_(optimizer, context_id)
        with pytest.raises(OptimizerError, match="already been called"):
            scaler.unscale_(optimizer, context_id)


def test_the_state_of_the_scaler_is_torchs() -> None:
    scaler, torch_scaler = GradScaler(init_scale=4.0), torch.amp.GradScaler("cpu")
    torch_scaler.load_state_dict(scaler.state_dict())
    other = GradScaler()
    other.load_state_dict(torch_scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


def test_a_scaler_that_is_not_enabled_changes_nothing() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.1)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    scaler = GradScaler(enabled=False)
    (batch,) = batches(1)
    loss_of(local, batch).backward()
    plain.step()
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(loss_of(spread, batch))])
        assert scaler.step(distributed, context_id)
        scaler.update()
    torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))
    assert scaler.get_scale() == 1.0


def test_lists_and_lazy_losses_are_scaled() -> None:
    remote = RemoteModule("worker1", nn.Linear, (2, 1))
    scaler = GradScaler(init_scale=8.0)
    losses = scaler.scale([torch.ones(()), (torch.ones(()),)])
    assert losses == [torch.tensor(8.0), (torch.tensor(8.0),)]
    with autograd.context() as context_id:
        scaler.scale(remote.lazy(torch.ones(1, 2)).then(torch.sum)).backward(context_id)
        assert remote.run(bias_gradient, context_id) == 8.0
    with pytest.raises(TypeError, match="A loss is a tensor"):
        scaler.scale(1.0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="A loss is a tensor"):
        scaler.scale("loss")
    with pytest.raises(TypeError, match="give init_scale by its name"):
        GradScaler(8.0)  # type: ignore[arg-type]


def bias_gradient(module: nn.Linear, context_id: int) -> float:
    return float(autograd.get_gradients(context_id)[module.bias])


def test_an_optimizer_of_torch_is_referred_to_the_scaler_of_torch() -> None:
    plain = optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=r"for SGD there is torch\.amp\.GradScaler"):
        GradScaler().step(plain)  # type: ignore[arg-type]


def test_a_step_that_was_undone_can_be_tried_again_and_is_not_unscaled_again() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(FailsOnOrder, spread, lr=0.1, atomic=True)
    scaler = GradScaler(init_scale=4.0)
    (batch,) = batches(1)
    rpc.rpc_sync("worker2", set_failing, (True,))
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(loss_of(spread, batch))])
        with pytest.raises(StepFailed, match="No worker kept the step"):
            scaler.step(optimizer, context_id)
        rpc.rpc_sync("worker2", set_failing, (False,))
        assert scaler.step(optimizer, context_id)
    scaler.update()
    torch.testing.assert_close(dict(spread.state_dict()), stepped_once(batch))


def test_each_update_belongs_to_a_step_and_each_step_to_an_update() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    scaler = GradScaler(init_scale=4.0)
    with pytest.raises(OptimizerError, match="comes after step"):
        scaler.update()
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(loss_of(spread, batches(1)[0]))])
        scaler.step(optimizer, context_id)
        with pytest.raises(OptimizerError, match="already been called"):
            scaler.step(optimizer, context_id)
        scaler.update()
        scaler.update(8.0)
    assert scaler.get_scale() == 8.0


def test_what_torchs_scaler_can_be_asked_this_one_can_be_too() -> None:
    scaler, plain = GradScaler("cpu", 4.0), torch.amp.GradScaler("cpu", 4.0)
    for name in (name for name in dir(plain) if not name.startswith("_")):
        assert hasattr(scaler, name), name
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        assert getattr(scaler, name)() == getattr(plain, name)()
    half = torch.tensor(2.0, dtype=torch.float16)
    assert scaler.scale(half).dtype == plain.scale(half).dtype == torch.float32
    with pytest.raises(OptimizerError, match="not enabled"):
        scaler.load_state_dict(GradScaler(enabled=False).state_dict())


def test_a_step_that_is_skipped_leaves_other_contexts_as_they_are() -> None:
    """And zero_grad, too: what was to be unscaled still is, and is not applied as it is."""
    fine, bad = Spread(), OverflowsInTheMiddle()
    before = copy.deepcopy(fine.state_dict())
    optimizer = DistributedOptimizer(optim.SGD, [fine, bad], lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    (batch,) = batches(1)

    def in_one_context() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [scaler.scale(loss_of(bad, batch))])
            assert not scaler.step(optimizer, context_id)

    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(loss_of(fine, batch))])
        scaler.unscale_(optimizer, context_id)
        other = threading.Thread(target=in_one_context)
        other.start()
        other.join(30)
        optimizer.zero_grad()
        assert scaler.step(optimizer, context_id)
    torch.testing.assert_close(dict(fine.state_dict()), stepped_once(batch))
    assert not torch.equal(fine.state_dict()["last.weight"], before["last.weight"])


def test_what_was_accumulated_and_dropped_is_unscaled_when_it_comes_again() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    scaler = GradScaler(init_scale=64.0)
    (batch,) = batches(1)
    for dropped in (True, False):
        with autograd.context() as context_id:
            autograd.backward(context_id, [scaler.scale(loss_of(spread, batch))])
            optimizer.accumulate(context_id)
        if dropped:
            scaler.unscale_(optimizer, None)
            optimizer.zero_grad()
    assert scaler.step(optimizer)
    torch.testing.assert_close(dict(spread.state_dict()), stepped_once(batch))
