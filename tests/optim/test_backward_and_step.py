"""Backward and step in one give the parameters of torch in one process, and say what failed."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, rpc
from telegrad.autograd import PassFailed, UnknownContext
from telegrad.nn import RemoteModule, RemoteSequential
from telegrad.optim import DistributedOptimizer, GradScaler, OptimizerError, StepFailed
from telegrad.optim import owned as owned_module
from telegrad.rpc.current import current_node
from tests.nn.job import nursery
from tests.optim.failing import FailsOnOrder, set_failing
from tests.optim.models import SIZES, Layer, Local, Spread, batches, loss_of
from tests.rpc.fleet import Job
from tests.rpc.inside import when_settled

pytestmark = pytest.mark.usefixtures("workers")
Batch = tuple[Tensor, Tensor]


class Bent(nn.Module):
    """First layer here, the middle on worker1, the last here again: gradients come back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(*SIZES[0])
        self.middle = RemoteModule("worker1", Layer, SIZES[1])
        self.last = Layer(*SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class InARow(nn.Module):
    """All layers on workers, two of them on one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RemoteModule("worker1", Layer, SIZES[0])
        self.middle = RemoteModule("worker2", Layer, SIZES[1])
        self.last = RemoteModule("worker1", Layer, SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = RemoteSequential(self.first, self.middle, self.last)(x)
        return result


MODELS = [Spread, Bent, InARow]
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (optim.Adam, {"lr": 0.01, "fused": True}),
]


def name_of(kind: Any) -> str:
    if isinstance(kind, dict):
        return "-".join(f"{key}={value}" for key, value in kind.items())
    return str(kind.__name__)


def step_locally(model: nn.Module, optimizer: optim.Optimizer, batch: Batch) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_once(model: nn.Module, optimizer: DistributedOptimizer, batch: Batch, **k: Any) -> Tensor:
    with autograd.context() as context_id:
        loss = loss_of(model, batch)
        optimizer.backward_and_step(context_id, [loss], **k)
    return loss.detach()


def assert_same(model: nn.Module, local: nn.Module) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(local.state_dict()), rtol=0, atol=0)


def calls_of(work: Callable[[], object]) -> int:
    before = current_node().calls_made()
    work()
    return current_node().calls_made() - before


def set_brief(seconds: float) -> None:
    owned_module.BRIEF = seconds


@pytest.fixture(params=[0.0, 3600.0], ids=["not brief", "brief"])
def brief(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether gradients for the parent wait for the step."""
    usual = owned_module.BRIEF
    for name in ("main", "worker1", "worker2"):
        rpc.rpc_sync(name, set_brief, (request.param,))
    yield
    for name in ("main", "worker1", "worker2"):
        rpc.rpc_sync(name, set_brief, (usual,))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(("optimizer_class", "options"), KINDS, ids=name_of)
def test_losses_and_parameters_are_those_of_one_process(
    make: Any, optimizer_class: Any, options: dict[str, Any]
) -> None:
    local, model = Local(), make()
    plain = optimizer_class(local.parameters(), **options)
    distributed = DistributedOptimizer(optimizer_class, model, **options)
    for place, batch in enumerate(batches(6)):
        mode = "fast" if place % 2 else "smart"
        assert torch.equal(
            step_once(model, distributed, batch, mode=mode), step_locally(local, plain, batch)
        )
        assert_same(model, local)


def test_it_costs_no_call_beside_those_of_the_pass() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    batch = batches(1)[0]

    def backward() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(spread, batch)])

    step_once(spread, optimizer, batch)
    assert calls_of(lambda: step_once(spread, optimizer, batch)) == calls_of(backward)


# Options.


def one_cycle(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)


def there_and_back(optimizer: optim.Optimizer) -> Any:
    """Each second step has the rate that the optimizer was made with."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 if step % 2 else 1.0)


@pytest.mark.parametrize("make", [one_cycle, there_and_back])
def test_options_that_schedulers_change_travel_along(make: Any) -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.05, momentum=0.9)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.05, momentum=0.9)
    schedule, plain_schedule = make(distributed), make(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(6):
            step_locally(local, plain, batch)
            plain_schedule.step()
            step_once(spread, distributed, batch)
            schedule.step()
            assert_same(spread, local)


class Halves(nn.Module):
    """Two layers of which a pass uses one."""

    def __init__(self, remote: bool) -> None:
        super().__init__()
        self.left: nn.Module
        self.right: nn.Module
        if remote:
            self.left = RemoteModule("worker1", Layer, (6, 3, 1))
            self.right = RemoteModule("worker2", Layer, (6, 3, 2))
        else:
            self.left, self.right = Layer(6, 3, 1), Layer(6, 3, 2)

    def forward(self, x: Tensor, side: str) -> Tensor:
        result: Tensor = getattr(self, side)(x)
        return result


@pytest.mark.parametrize("apart", [(), (3,), (2, 5)], ids=str)
def test_owners_without_a_part_in_a_pass_hear_later_of_what_has_changed(
    apart: tuple[int, ...],
) -> None:
    """Steps by themselves come between, and rates go back to what they were."""
    local, spread = Halves(False), Halves(True)
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1, momentum=0.9)
    rates = [0.1, 0.2, 0.1, 0.3, 0.3, 0.1, 0.2, 0.1]
    sides = ["left", "left", "right", "right", "left", "right", "left", "left"]
    for place, (batch, rate, side) in enumerate(zip(batches(8), rates, sides, strict=True)):
        plain.param_groups[0]["lr"] = distributed.param_groups[0]["lr"] = rate
        plain.zero_grad()
        nn.functional.mse_loss(local(batch[0], side), batch[1]).backward()
        plain.step()
        with autograd.context() as context_id:
            loss = nn.functional.mse_loss(spread(batch[0], side), batch[1])
            if place in apart:
                autograd.backward(context_id, [loss])
                distributed.step(context_id)
            else:
                distributed.backward_and_step(context_id, [loss])
        assert_same(spread, local)


def test_parameter_groups_span_workers_and_have_options_of_their_own() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(
        [
            {"params": [*local.first.parameters(), *local.last.parameters()], "lr": 0.5},
            {"params": local.middle.parameters(), "momentum": 0.9},
        ],
        lr=0.1,
    )
    distributed = DistributedOptimizer(
        optim.SGD,
        [
            {"params": [spread.first, spread.last], "lr": 0.5},
            {"params": spread.middle, "momentum": 0.9},
        ],
        lr=0.1,
    )
    for place, batch in enumerate(batches(4)):
        for each in (plain, distributed):
            each.param_groups[place % 2]["lr"] *= 0.5
        step_locally(local, plain, batch)
        step_once(spread, distributed, batch)
    assert_same(spread, local)


@pytest.mark.parametrize("in_one", [False, True])
def test_a_group_that_is_added_does_not_hide_what_changed_in_others(in_one: bool) -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD([*local.first.parameters(), *local.last.parameters()], lr=0.1)
    distributed = DistributedOptimizer(optim.SGD, [spread.first, spread.last], lr=0.1)
    for each, middle in ((plain, list(local.middle.parameters())), (distributed, spread.middle)):
        each.param_groups[0]["lr"] = 0.5
        each.add_param_group({"params": middle, "lr": 0.2})
    (batch,) = batches(1)
    step_locally(local, plain, batch)
    with autograd.context() as context_id:
        loss = loss_of(spread, batch)
        if in_one:
            distributed.backward_and_step(context_id, [loss])
        else:
            autograd.backward(context_id, [loss])
            distributed.step(context_id)
    assert_same(spread, local)


def test_options_that_are_tensors_have_the_step_come_afterwards() -> None:
    local, spread = Local(), Spread()
    options = {"lr": torch.tensor(0.1), "foreach": False}
    plain = optim.Adam(local.parameters(), **copy.deepcopy(options))  # type: ignore[arg-type]
    distributed = DistributedOptimizer(optim.Adam, spread, **options)
    for batch in batches(3):
        for each in (plain, distributed):
            each.param_groups[0]["lr"].mul_(0.5)
        step_locally(local, plain, batch)
        step_once(spread, distributed, batch)
    assert_same(spread, local)


def test_options_that_are_too_long_to_travel_with_gradients_are_told_by_themselves() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.1)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    for batch, note in zip(batches(3), ["", "long" * 10_000, "short"], strict=True):
        for each in (plain, distributed):
            each.param_groups[0].update(lr=each.param_groups[0]["lr"] / 2, note=note)
        step_locally(local, plain, batch)
        step_once(spread, distributed, batch)
        assert_same(spread, local)


# What else there is to a step.


def test_passes_of_one_context_add_up_also_on_workers_without_a_part_in_the_last() -> None:
    local, spread = Halves(False), Halves(True)
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1, momentum=0.9)
    weight = torch.ones(1, requires_grad=True)
    x, _ = batches(1)[0]
    for mode in ("smart", "fast"):
        plain.zero_grad()
        local(x, "left").sum().backward()
        (local(x, "left") * local(x, "right")).sum().backward()
        plain.step()
        with autograd.context() as context_id:
            left = spread(x, "left").sum()
            autograd.backward(context_id, [left], retain_graph=True)
            both = (spread(x, "left") * spread(x, "right")).sum()
            autograd.backward(context_id, [both], retain_graph=True)
            # Nothing of the model is in it.
            distributed.backward_and_step(context_id, [weight.sum()], mode=mode)
        torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))


def test_two_in_one_context_apply_what_two_steps_would() -> None:
    spread, twin = Spread(), Spread()
    one = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    other = DistributedOptimizer(optim.SGD, twin, lr=0.1)
    first, second = batches(2)
    for _ in range(2):
        with autograd.context() as context_id:
            one.backward_and_step(context_id, [loss_of(spread, first)])
            one.backward_and_step(context_id, [loss_of(spread, second)])
        with autograd.context() as context_id:
            for batch in (first, second):
                autograd.backward(context_id, [loss_of(twin, batch)])
                other.step(context_id)
    assert_same(spread, twin)


def test_a_graph_that_was_run_is_gone_as_after_backward() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with autograd.context() as context_id:
        loss = loss_of(spread, batches(1)[0])
        optimizer.backward_and_step(context_id, [loss])
        with pytest.raises((RuntimeError, PassFailed)):
            autograd.backward(context_id, [loss])


def test_what_was_accumulated_is_a_part_of_the_step() -> None:
    spread, twin = Spread(), Spread()
    one = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    other = DistributedOptimizer(optim.SGD, twin, lr=0.1)
    first, second = batches(2)
    for model, optimizer in ((spread, one), (twin, other)):
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(model, first)])
            optimizer.accumulate(context_id)
    step_once(spread, one, second)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(twin, second)])
        other.step(context_id)
    assert_same(spread, twin)
    step_once(spread, one, first)


def test_gradients_that_are_to_be_clipped_are() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.5)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.5)
    (batch,) = batches(1)
    loss_of(local, batch).backward()
    nn.utils.clip_grad_value_(local.parameters(), 0.01)
    plain.step()
    with autograd.context() as context_id:
        distributed.clip_grad_value_(context_id, 0.01)
        distributed.backward_and_step(context_id, [loss_of(spread, batch)])
    assert_same(spread, local)


def test_what_was_to_be_clipped_by_itself_is_refused_as_by_step() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    optimizer.clip_grad_value_(None, 1.0)
    with pytest.raises(OptimizerError, match="under the context None"):
        step_once(spread, optimizer, batches(1)[0])


def test_a_scaler_goes_on_with_its_own_step_beside_it() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1, momentum=0.9)
    scaler = GradScaler(init_scale=1024.0)
    for place, batch in enumerate(batches(4)):
        step_locally(local, plain, batch)
        if place % 2:
            step_once(spread, distributed, batch)
            continue
        with autograd.context() as context_id:
            autograd.backward(context_id, [scaler.scale(loss_of(spread, batch))])
            scaler.step(distributed, context_id)
        scaler.update()
    assert_same(spread, local)


def test_atomic_steps_can_be_made_with_it_as_well() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.1)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.1, atomic=True)
    for batch in batches(2):
        step_locally(local, plain, batch)
        step_once(spread, distributed, batch)
    assert_same(spread, local)


@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_the_step_run_once(before: bool) -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    seen: list[str] = []
    if before:
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step_once(spread, optimizer, batches(1)[0])
    assert seen == (["before", "after"] if before else ["after"])


def test_a_hook_before_the_step_finds_the_gradients_and_may_clip_them() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.5)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.5)
    plain.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(local.parameters(), 0.01) and None
    )
    distributed.register_step_pre_hook(clip_first)
    for batch in batches(2):
        step_locally(local, plain, batch)
        step_once(spread, distributed, batch)
    torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))


def clip_first(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.clip_grad_norm_(args[1], 0.01)


def test_the_profiler_sees_one_step() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step_once(spread, optimizer, batches(1)[0])
    names = [event.name for event in profile.events()]
    assert names.count("Optimizer.step#DistributedOptimizer.step") == 1


_shared: list[nn.Linear] = []


def shared_layer() -> nn.Linear:
    if not _shared:
        torch.manual_seed(0)
        _shared.append(nn.Linear(3, 3, bias=False))
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = _shared[0].weight
    return layer


def test_a_weight_that_two_remote_modules_share_is_stepped_once() -> None:
    one, two = (RemoteModule("worker2", shared_layer) for _ in range(2))
    weight = one.state_dict()["weight"].clone().requires_grad_()
    optimizer = DistributedOptimizer(optim.SGD, [one, two], lr=0.5, momentum=0.9)
    plain = optim.SGD([weight], lr=0.5, momentum=0.9)
    x = torch.ones(2, 3)
    for _ in range(3):
        plain.zero_grad()
        nn.functional.linear(nn.functional.linear(x, weight), weight).sum().backward()
        plain.step()
        with autograd.context() as context_id:
            optimizer.backward_and_step(context_id, [two(one(x)).sum()])
    torch.testing.assert_close(two.state_dict()["weight"], weight.detach(), rtol=0, atol=0)


def test_parameters_without_gradient_stay_as_they_are() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.Adam, spread, lr=0.1, weight_decay=0.1)
    before = copy.deepcopy(spread.state_dict())
    with autograd.context() as context_id:
        spread.middle(torch.ones(2, 5))  # A result that is not used.
        optimizer.backward_and_step(context_id, [spread.first(torch.ones(2, 6)).sum()])
    after = spread.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"first.weight", "first.bias"}


def test_it_neither_uses_nor_changes_grad() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    spread.last.weight.grad = torch.full_like(spread.last.weight, 1e6)
    step_once(spread, optimizer, batches(1)[0])
    assert spread.last.weight.abs().max() < 10
    assert torch.all(spread.last.weight.grad == 1e6)


def test_of_two_optimizers_over_one_model_each_steps_for_itself() -> None:
    local, spread = Local(), Spread()
    first = DistributedOptimizer(optim.SGD, [spread.first], lr=0.1)
    rest = DistributedOptimizer(optim.Adam, [spread.middle, spread.last], lr=0.01)
    plain_first = optim.SGD(local.first.parameters(), lr=0.1)
    plain_rest = optim.Adam([*local.middle.parameters(), *local.last.parameters()], lr=0.01)
    for place, batch in enumerate(batches(4)):
        plain, distributed = ((plain_first, first), (plain_rest, rest))[place % 2]
        local.zero_grad()
        step_locally(local, plain, batch)
        step_once(spread, distributed, batch)
        assert_same(spread, local)


def test_other_ways_to_begin_a_pass_do_not_step() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    batch = batches(1)[0]
    step_once(spread, optimizer, batch)
    before = copy.deepcopy(spread.state_dict())
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batch)])
        lazy = spread.middle.lazy(spread.first.lazy(batch[0])).then(torch.sum)
        lazy.backward(context_id)
    torch.testing.assert_close(dict(spread.state_dict()), dict(before), rtol=0, atol=0)


def test_an_optimizer_that_is_gone_leaves_no_follower() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    step_once(spread, optimizer, batches(1)[0])
    followers = autograd.api.autograd_of().sequels._followers
    key = optimizer._parts.key
    assert key in followers
    ghost = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ghost() is None
    # The death of a reference is told a little later.
    assert when_settled(lambda: key not in followers)
    step_once(spread, DistributedOptimizer(optim.SGD, spread, lr=0.1), batches(1)[0])


def test_compiled_steps_equal_those_of_eager_mode() -> None:
    local, model = Local(), Bent()
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(optim.SGD, model, lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.backward_and_step(context_id, [loss])
        return loss.detach()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for batch in batches(3):
        torch.testing.assert_close(compiled(*batch), step_locally(local, plain, batch))
    torch.testing.assert_close(dict(model.state_dict()), dict(local.state_dict()))


def compiled_forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model.forward, backend="aot_eager", fullgraph=True)


def checkpointed_forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model.forward, x, use_reentrant=False)


@pytest.mark.parametrize("around", [compiled_forward, checkpointed_forward])
def test_calls_inside_of_nodes_and_those_that_are_made_again_take_part(around: Any) -> None:
    local, model = Local(), Bent()
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(optim.SGD, model, lr=0.1, momentum=0.9)
    forward = around(model)
    for x, y in batches(3):
        step_locally(local, plain, (x, y))
        with autograd.context() as context_id:
            optimizer.backward_and_step(context_id, [nn.functional.mse_loss(forward(x), y)])
    torch.testing.assert_close(dict(model.state_dict()), dict(local.state_dict()))


# Several at once.


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50))

    def forward(self, scale: float) -> Tensor:
        return self.weight.sum() * scale


def pull_down(shared: RemoteModule, scale: float, steps: int) -> None:
    optimizer = DistributedOptimizer(optim.SGD, shared, lr=1.0)
    for _ in range(steps):
        with autograd.context() as context_id:
            optimizer.backward_and_step(context_id, [shared(scale)])


def test_trainers_that_share_parameters_lose_no_update() -> None:
    shared = RemoteModule("worker1", Weight)
    scales = {1.0: "main", 16.0: "main", 256.0: "worker2", 4096.0: "worker1"}
    futures = [rpc.rpc_async(w, pull_down, (shared, s, 10)) for s, w in scales.items()]
    for future in futures:
        future.wait()
    assert torch.equal(shared.state_dict()["weight"], torch.full((50,), -10.0 * sum(scales)))


def test_threads_may_share_one_optimizer() -> None:
    shared = RemoteModule("worker1", Weight)
    optimizer = DistributedOptimizer(optim.SGD, shared, lr=1.0)
    errors: list[BaseException] = []

    def train(scale: float) -> None:
        try:
            for _ in range(10):
                with autograd.context() as context_id:
                    optimizer.backward_and_step(context_id, [shared(scale)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(scale,)) for scale in (1.0, 16.0, 256.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(shared.state_dict()["weight"], torch.full((50,), -10.0 * 273.0))


def train_there() -> dict[str, Tensor]:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model, lr=0.1, momentum=0.9)
    for batch in batches(3):
        step_once(model, optimizer, batch)
    return dict(model.state_dict())


@pytest.mark.parametrize("driver", ["worker1", "worker2"])
def test_any_worker_may_drive(driver: str) -> None:
    local = Local()
    plain = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(3):
        step_locally(local, plain, batch)
    found = rpc.rpc_sync(driver, train_there)
    torch.testing.assert_close(found, dict(local.state_dict()), rtol=0, atol=0)


def in_another_context(x: Tensor, remote: RemoteModule) -> Tensor:
    result: Tensor = remote(x)
    return result


def test_calls_that_nest_take_part() -> None:
    """A worker calls another for this one: that one's parameters are stepped as well."""
    local, remote = Layer(6, 5, 1), RemoteModule("worker2", Layer, (6, 5, 1))
    plain = optim.SGD(local.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(optim.SGD, remote, lr=0.1)
    for x, _ in batches(3):
        plain.zero_grad()
        local(x).sum().backward()
        plain.step()
        with autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", in_another_context, (x, remote))
            optimizer.backward_and_step(context_id, [result.sum()])
    torch.testing.assert_close(dict(remote.state_dict()), dict(local.state_dict()), rtol=0, atol=0)


# What is wrong.


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"roots": [torch.ones(2, requires_grad=True)]}, RuntimeError),
        ({"roots": [torch.ones(())]}, RuntimeError),
        ({"roots": []}, (ValueError, RuntimeError)),
        ({"roots": [3]}, TypeError),
        ({"roots": torch.ones((), requires_grad=True)}, TypeError),
        ({"mode": "slow"}, ValueError),
        ({"timeout": -1.0}, ValueError),
        ({"context_id": 12345}, UnknownContext),
        ({"context_id": None}, TypeError),
        ({"context_id": "1"}, (TypeError, UnknownContext)),
    ],
    ids=str,
)
def test_arguments_that_are_wrong_leave_no_failure(given: dict[str, Any], error: Any) -> None:
    local, spread = Local(), Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    plain = optim.SGD(local.parameters(), lr=0.1)
    (batch,) = batches(1)
    with autograd.context() as context_id:
        arguments = {"context_id": context_id, "roots": [loss_of(spread, batch)], **given}
        with pytest.raises(error) as caught:
            optimizer.backward_and_step(**arguments)
    assert not isinstance(caught.value, StepFailed)
    step_locally(local, plain, batch)
    step_once(spread, optimizer, batch)
    assert_same(spread, local)


@pytest.fixture
def worker2_fails() -> Iterator[None]:
    rpc.rpc_sync("worker2", set_failing, (True,))
    yield
    rpc.rpc_sync("worker2", set_failing, (False,))


@pytest.mark.usefixtures("worker2_fails", "brief")
@pytest.mark.parametrize("make", [Spread, InARow])
def test_a_step_that_fails_on_one_worker_is_told_and_bars_the_next(make: Any) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    optimizer = DistributedOptimizer(FailsOnOrder, model, lr=0.1)
    state = optimizer.state_dict()
    (batch,) = batches(1)
    with pytest.raises(StepFailed, match=r"worker 'worker2'.*told to fail.*middle\.weight") as info:
        step_once(model, optimizer, batch)
    assert info.value.stepped is None
    assert set(info.value.failed) == {"worker2"}
    assert not info.value.undone
    assert "Some workers may have stepped" in str(info.value)
    with autograd.context() as context_id:
        loss = loss_of(model, batch)
        with pytest.raises(OptimizerError, match="load a checkpoint or a state_dict"):
            optimizer.backward_and_step(context_id, [loss])
        autograd.backward(context_id, [loss])
        with pytest.raises(OptimizerError, match="load a checkpoint or a state_dict"):
            optimizer.step(context_id)
    model.load_state_dict(before)
    optimizer.load_state_dict(state)
    rpc.rpc_sync("worker2", set_failing, (False,))
    local = Local()
    step_locally(local, optim.SGD(local.parameters(), lr=0.1), batch)
    step_once(model, optimizer, batch)
    assert_same(model, local)


class Stops(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_during_the_step_here_is_raised_as_it_is_and_bars_the_next() -> None:
    model = Bent()
    optimizer = DistributedOptimizer(Stops, [model.first, model.last], lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        step_once(model, optimizer, batches(1)[0])
    with pytest.raises(OptimizerError, match="load a checkpoint or a state_dict"):
        step_once(model, optimizer, batches(1)[0])


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("broken formula")


def test_a_pass_that_fails_here_bars_the_next_and_keeps_no_graph() -> None:
    model = Bent()
    optimizer = DistributedOptimizer(optim.SGD, model, lr=0.1)
    (batch,) = batches(1)
    activation: list[weakref.ref[Tensor]] = []

    def fail() -> None:
        with autograd.context() as context_id:
            hidden = model.first(batch[0])
            activation.append(weakref.ref(hidden))
            loss = model.last(model.middle(Breaks.apply(hidden))).sum()
            optimizer.backward_and_step(context_id, [loss])

    with pytest.raises(StepFailed, match=r"On worker 'main': ArithmeticError: broken") as info:
        fail()
    assert isinstance(info.value.__cause__, ArithmeticError)
    del info
    gc.collect()
    assert when_settled(lambda: activation[0]() is None)
    with pytest.raises(OptimizerError, match="load a checkpoint or a state_dict") as refused:
        step_once(model, optimizer, batch)
    assert isinstance(refused.value.__cause__, StepFailed)


gate = threading.Event()


class Waits(nn.Module):
    """Its backward waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.weight
        result.register_hook(wait_at_gate)
        return result


participants: list[Any] = []


def wait_at_gate(gradient: Tensor) -> None:
    if not gate.is_set():
        for context in autograd.api.autograd_of().container:
            participants.extend(context.participants.values())
        assert gate.wait(60)


def open_gate() -> None:
    gate.set()


def close_gate() -> None:
    gate.clear()


def someone_drives() -> bool:
    """Whether a pass that had to wait is still under way."""
    assert participants
    return any(participant._driving for participant in participants)


def test_a_pass_that_took_too_long_does_not_step_after_it_was_given_up() -> None:
    """What is loaded afterwards is not changed by the step that comes too late."""
    module = RemoteModule("worker1", Waits)
    optimizer = DistributedOptimizer(optim.SGD, module, lr=0.1)
    rpc.rpc_sync("worker1", close_gate)
    with pytest.raises(StepFailed, match=r"did not end in 3 s") as info:
        step_summed(module, optimizer, timeout=3)
    assert isinstance(info.value.__cause__, rpc.CallTimeout)
    module.load_state_dict({"weight": torch.full((3,), 5.0)})
    optimizer.load_state_dict(optimizer.state_dict())
    rpc.rpc_sync("worker1", open_gate)
    while rpc.rpc_sync("worker1", someone_drives):
        pass
    assert torch.equal(module.state_dict()["weight"], torch.full((3,), 5.0))
    step_summed(module, optimizer)
    assert torch.equal(module.state_dict()["weight"], torch.full((3,), 5.0 - 0.1))


def step_summed(module: nn.Module, optimizer: DistributedOptimizer, **given: Any) -> None:
    with autograd.context() as context_id:
        optimizer.backward_and_step(context_id, [module(torch.ones(3)).sum()], **given)


def test_what_fast_mode_finds_unused_is_a_failed_step() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    service = autograd.api.autograd_of()
    usual, service.stall_time = service.stall_time, 0.1
    try:
        with autograd.context() as context_id:
            loss = loss_of(spread, batches(1)[0])
            spread.first(torch.ones(2, 6, requires_grad=True) * 2)  # Nobody uses it.
            with pytest.raises(StepFailed, match="never used"):
                optimizer.backward_and_step(context_id, [loss], mode="fast")
    finally:
        service.stall_time = usual


# Deaths.


class Dies(optim.SGD):
    """Ends its process where it was told to, before or after it has stepped."""

    def step(self, closure: Any = None) -> Any:
        if deadly == "before":
            os._exit(1)
        result = super().step(closure)
        if deadly == "after":
            os._exit(1)
        return result


deadly = ""


def set_deadly(when: str) -> None:
    global deadly
    deadly = when


class DiesInBackward(Layer):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if deadly == "in backward":
            result.register_hook(lambda _: os._exit(1))
        return result


class Mortal(Spread):
    def __init__(self) -> None:
        super().__init__()
        self.middle = RemoteModule("worker2", DiesInBackward, SIZES[1])


def lose_worker2(when: str) -> tuple[list[str], str, str]:
    """On the driver: who failed, and what is said then and of the next step."""
    model = Mortal()
    optimizer = DistributedOptimizer(Dies, model, lr=0.1)
    (batch,) = batches(1)
    step_once(model, optimizer, batch)
    rpc.rpc_sync("worker2", set_deadly, (when,))
    with pytest.raises(StepFailed) as failed:
        step_once(model, optimizer, batch)
    assert failed.value.stepped is None
    assert isinstance(failed.value.__cause__, rpc.WorkerLost)
    with autograd.context() as context_id, pytest.raises(OptimizerError) as refused:
        optimizer.backward_and_step(context_id, [model.last(torch.ones(2, 4)).sum()])
    rest = DistributedOptimizer(optim.SGD, [model.first, model.last], lr=0.1)
    with autograd.context() as context_id:
        rest.backward_and_step(context_id, [model.first(batch[0]).sum()])
    return list(failed.value.failed), str(failed.value), str(refused.value)


@pytest.mark.parametrize("when", ["before", "after", "in backward"])
def test_a_worker_that_dies_in_its_part_is_named_and_the_next_step_refused(when: str) -> None:
    job = Job(nursery(), ("main", "worker1", "worker2"))
    try:
        failed, said, refused = job["main"].do(lose_worker2, when)
    finally:
        job.abandon()
    assert failed == ["worker2"]
    assert "'worker2'" in said
    assert "load a checkpoint or a state_dict" in refused
