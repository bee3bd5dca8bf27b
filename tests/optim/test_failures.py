"""What the optimizer says, and what state it leaves, when something is wrong."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn, optim

from telegrad import autograd, rpc
from telegrad.autograd import UnknownContext
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, OptimizerError, StepFailed
from telegrad.rpc.current import current_node
from tests.optim.failing import FailsOnOrder, set_failing
from tests.optim.models import Spread, batches, loss_of

pytestmark = pytest.mark.usefixtures("workers")


def one_step(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(model, batches(1)[0])])
        optimizer.step(context_id)


@pytest.fixture
def worker2_fails() -> Any:
    rpc.rpc_sync("worker2", set_failing, (True,))
    yield
    rpc.rpc_sync("worker2", set_failing, (False,))


@pytest.mark.usefixtures("worker2_fails")
def test_a_step_that_fails_on_one_worker_says_who_stepped_and_bars_the_next() -> None:
    spread = Spread()
    before = copy.deepcopy(spread.state_dict())
    optimizer = DistributedOptimizer(FailsOnOrder, spread, lr=0.1)
    state = optimizer.state_dict()
    with pytest.raises(StepFailed, match=r"worker 'worker2'.*told to fail.*middle\.weight") as info:
        one_step(spread, optimizer)
    assert set(info.value.stepped) == {"main", "worker1"}
    assert set(info.value.failed) == {"worker2"}
    after = spread.state_dict()
    assert not torch.equal(after["first.weight"], before["first.weight"])
    with pytest.raises(OptimizerError, match="load a checkpoint or a state_dict"):
        one_step(spread, optimizer)
    spread.load_state_dict(before)
    optimizer.load_state_dict(state)
    rpc.rpc_sync("worker2", set_failing, (False,))
    one_step(spread, optimizer)


@pytest.mark.usefixtures("worker2_fails")
def test_an_atomic_step_that_fails_on_one_worker_is_made_on_none() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(FailsOnOrder, spread, lr=0.1, momentum=0.9, atomic=True)
    rpc.rpc_sync("worker2", set_failing, (False,))
    one_step(spread, optimizer)
    before, state = copy.deepcopy((spread.state_dict(), optimizer.state_dict()))
    rpc.rpc_sync("worker2", set_failing, (True,))
    with pytest.raises(StepFailed, match="No worker kept the step") as info:
        one_step(spread, optimizer)
    assert info.value.stepped == ()
    torch.testing.assert_close(dict(spread.state_dict()), dict(before), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    rpc.rpc_sync("worker2", set_failing, (False,))
    one_step(spread, optimizer)


def test_a_clipping_that_no_step_followed_is_forgotten_with_its_context() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    for _ in range(3):
        with autograd.context() as context_id:
            optimizer.clip_grad_value_(context_id, 1.0)
    assert len(optimizer._treatments) == 1


def embedding() -> nn.Module:
    return nn.Embedding(4, 2, sparse=True)


def test_a_sparse_gradient_that_the_optimizer_refuses_names_worker_and_parameter() -> None:
    table = RemoteModule("worker1", embedding)
    optimizer = DistributedOptimizer(optim.Adam, [("table", table)], lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [table(torch.tensor([1])).sum()])
        with pytest.raises(StepFailed, match=r"worker 'worker1'.*sparse.*'table\.weight'"):
            optimizer.step(context_id)


def test_options_that_torch_refuses_are_told_with_torchs_words() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(optim.SGD, Spread(), lr=-1.0)


def test_a_reference_to_no_tensor_is_refused_by_name() -> None:
    rref = rpc.remote("worker1", dict)
    with pytest.raises(OptimizerError, match=r"'odd' on worker 'worker1' is a dict, not a tensor"):
        DistributedOptimizer(optim.SGD, [("odd", rref)], lr=0.1)


def computed() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def test_the_result_of_a_computation_is_no_parameter() -> None:
    rref = rpc.remote("worker1", computed)
    with pytest.raises(OptimizerError, match=r"'parameter 0' on worker 'worker1' is not a leaf"):
        DistributedOptimizer(optim.SGD, [rref], lr=0.1)


@pytest.mark.parametrize("params", [[], [{"params": []}]])
def test_no_parameters_are_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(optim.SGD, params, lr=0.1)


@pytest.mark.parametrize("params", [3, "weight", [3], {"params": []}])
def test_what_is_no_parameter_is_refused(params: Any) -> None:
    with pytest.raises(TypeError):
        DistributedOptimizer(optim.SGD, params, lr=0.1)


def test_a_context_that_is_gone_cannot_be_stepped() -> None:
    optimizer = DistributedOptimizer(optim.SGD, Spread(), lr=0.1)
    with autograd.context() as context_id:
        pass
    with pytest.raises(UnknownContext):
        optimizer.step(context_id)
    with pytest.raises(UnknownContext):
        optimizer.accumulate(context_id)


def test_a_closure_is_refused() -> None:
    optimizer = DistributedOptimizer(optim.SGD, Spread(), lr=0.1)
    with pytest.raises(TypeError, match="takes a context id, not a closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]


def test_an_optimizer_that_needs_a_closure_is_refused_when_it_is_made() -> None:
    with pytest.raises(OptimizerError, match=r"LBFGS .* cannot be distributed"):
        DistributedOptimizer(optim.LBFGS, Spread())


def test_parameters_that_torch_refuses_are_told_with_worker_and_names() -> None:
    remote = RemoteModule("worker1", nn.Linear, (2, 2))
    with pytest.raises(OptimizerError, match=r"'worker1'.*'0\.weight', '0\.bias'.* 2D") as info:
        DistributedOptimizer(optim.Muon, [remote], lr=0.1)
    assert isinstance(info.value, ValueError)


def test_a_group_that_one_owner_refuses_is_added_on_none() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, [spread.first, spread.middle], lr=0.1)
    no_tensor = rpc.remote("worker2", dict)
    for odd in ([spread.last.weight, spread.first], [spread.last, no_tensor]):
        with pytest.raises(OptimizerError):
            optimizer.add_param_group({"params": odd})
    optimizer.add_param_group({"params": [spread.last], "lr": 0.2})
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]
    assert set(optimizer.parts) == {"main", "worker1", "worker2"}
    one_step(spread, optimizer)


def test_what_is_no_group_is_refused() -> None:
    optimizer = DistributedOptimizer(optim.SGD, [torch.ones(1, requires_grad=True)], lr=0.1)
    for odd in ([torch.ones(1)], {"lr": 0.1}):
        with pytest.raises(TypeError, match="a dict with a key 'params'"):
            optimizer.add_param_group(odd)  # type: ignore[arg-type]


def test_a_context_that_is_gone_cannot_be_clipped() -> None:
    optimizer = DistributedOptimizer(optim.SGD, Spread(), lr=0.1)
    with autograd.context() as context_id:
        pass
    with pytest.raises(UnknownContext):
        optimizer.clip_grad_norm_(context_id, 1.0)
    with pytest.raises(UnknownContext):
        optimizer.clip_grad_value_(context_id, 1.0)


def complex_weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=torch.complex64))


def times(weight: rpc.RRef[nn.Parameter]) -> torch.Tensor:
    return (weight.local_value() * 3).abs().sum()


def test_a_gradient_that_cannot_be_clipped_names_worker_and_parameter() -> None:
    weight = rpc.rpc_sync("worker1", rref_to_complex_weight)
    optimizer = DistributedOptimizer(optim.SGD, [("phase", weight)], lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", times, (weight,))])
        optimizer.clip_grad_value_(context_id, 1.0)
        with pytest.raises(StepFailed, match=r"'worker1'.*complex.*'phase'"):
            optimizer.step(context_id)


def rref_to_complex_weight() -> rpc.RRef[nn.Parameter]:
    return rpc.RRef(complex_weight())


@pytest.mark.usefixtures("worker2_fails")
def test_an_atomic_step_that_fails_keeps_what_was_accumulated_and_how_to_clip_it() -> None:
    spread, twin = Spread(), Spread()
    optimizer = DistributedOptimizer(FailsOnOrder, spread, lr=0.1, atomic=True)
    expected = DistributedOptimizer(optim.SGD, twin, lr=0.1)
    for model, each in ((spread, optimizer), (twin, expected)):
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(model, batches(1)[0])])
            each.accumulate(context_id)
        each.clip_grad_norm_(None, 0.01)
    with pytest.raises(StepFailed, match="No worker kept the step"):
        optimizer.step()
    rpc.rpc_sync("worker2", set_failing, (False,))
    optimizer.step()
    expected.step()
    torch.testing.assert_close(dict(spread.state_dict()), dict(twin.state_dict()))


class WithMaster(FailsOnOrder):
    """Keeps a copy of each parameter in single precision, and counts where nobody looks."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().float() + 1e-4).add_(1e-4)
        return super().step(closure)


def masters(part: rpc.RRef[Any]) -> Any:
    optimizer = part.local_value()._optimizer
    states = [state["master"].clone() for state in optimizer.state.values()]
    return states, optimizer.param_groups[0]["count"]


@pytest.mark.usefixtures("worker2_fails")
def test_state_that_has_another_dtype_than_its_parameter_is_put_back_as_it_was() -> None:
    spread = Spread().bfloat16()
    optimizer = DistributedOptimizer(WithMaster, spread, lr=0.1, atomic=True)
    rpc.rpc_sync("worker2", set_failing, (False,))
    (x, y) = batches(1)[0]
    batch = (x.bfloat16(), y.bfloat16())
    for fails in (False, True):
        rpc.rpc_sync("worker2", set_failing, (fails,))
        before = rpc.rpc_sync("worker1", masters, (optimizer.parts["worker1"],)) if fails else None
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(spread, batch)])
            if fails:
                with pytest.raises(StepFailed, match="No worker kept the step"):
                    optimizer.step(context_id)
            else:
                optimizer.step(context_id)
    after = rpc.rpc_sync("worker1", masters, (optimizer.parts["worker1"],))
    assert after[0][0].dtype == torch.float32
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_set_of_parameters_is_refused_as_in_torch() -> None:
    with pytest.raises(TypeError, match="no order"):
        DistributedOptimizer(optim.SGD, set(nn.Linear(2, 2).parameters()), lr=0.1)


pause = 0.0


class Slow(optim.SGD):
    """Takes its time where it was told to."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(pause)
        return super().step(closure)


def set_pause(seconds: float) -> None:
    global pause
    pause = seconds


def test_an_atomic_step_that_comes_too_late_is_undone_as_well() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(Slow, spread, lr=0.1, momentum=0.9, atomic=True)
    one_step(spread, optimizer)
    before = copy.deepcopy(spread.state_dict())
    rpc.rpc_sync("worker2", set_pause, (4.0,))
    node = current_node()
    usual = node.timeout
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        node.timeout = 3.0  # What undoes the step has to wait for a part of it.
        try:
            with pytest.raises(StepFailed, match="No worker kept the step") as info:
                optimizer.step(context_id)
        finally:
            node.timeout = usual
    assert isinstance(info.value.failed["worker2"], rpc.CallTimeout)
    rpc.rpc_sync("worker2", set_pause, (0.0,))
    torch.testing.assert_close(dict(spread.state_dict()), dict(before), rtol=0, atol=0)
    one_step(spread, optimizer)


def test_an_atomic_step_of_which_nobody_knows_bars_the_next() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(Slow, spread, lr=0.1, atomic=True)
    rpc.rpc_sync("worker2", set_pause, (4.0,))
    node = current_node()
    usual, node.timeout = node.timeout, 0.2
    try:
        with (
            autograd.context() as context_id,
            pytest.raises(StepFailed, match="load a checkpoint") as info,
        ):
            optimizer.step(context_id)
    finally:
        node.timeout = usual
    assert not info.value.undone
    rpc.rpc_sync("worker2", set_pause, (0.0,))
    with pytest.raises(OptimizerError, match="load a checkpoint or a state_dict"):
        one_step(spread, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    one_step(spread, optimizer)


def undos_kept(part: rpc.RRef[Any]) -> bool:
    return part.local_value()._undo is not None


def test_an_atomic_step_that_all_have_made_leaves_no_copy_behind() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1, atomic=True)
    one_step(spread, optimizer)
    part = optimizer.parts["worker1"]
    until = time.monotonic() + 20
    while rpc.rpc_sync("worker1", undos_kept, (part,)):
        assert time.monotonic() < until
    assert not undos_kept(optimizer.parts["main"])
