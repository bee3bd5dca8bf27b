"""DistributedOptimizer does what the same torch optimizer does in one process."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc.current import current_node
from tests.optim.models import Local, Spread, batches, loss_of

pytestmark = pytest.mark.usefixtures("workers")

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    (optim.Adagrad, {"lr": 0.1, "fused": True}),
    (optim.Adam, {"lr": 0.01}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.Adam, {"lr": 0.01, "foreach": True}),
    (optim.Adam, {"lr": 0.01, "fused": True}),
    (optim.Adam, {"lr": 0.01, "maximize": True}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (optim.AdamW, {"lr": 0.01, "fused": True}),
    (optim.Adadelta, {"lr": 1.0}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.Rprop, {"lr": 0.01, "foreach": True}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.ASGD, {"lr": 0.01}),
]


def name_of(kind: Any) -> str:
    if isinstance(kind, dict):
        return "-".join(f"{key}={value}" for key, value in kind.items())
    return str(kind.__name__)


def assert_same_state(spread: nn.Module, local: nn.Module) -> None:
    torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))


@pytest.mark.parametrize(("optimizer_class", "options"), KINDS, ids=name_of)
def test_each_optimizer_gives_the_parameters_of_one_process(
    optimizer_class: Any, options: dict[str, Any]
) -> None:
    local, spread = Local(), Spread()
    plain = optimizer_class(local.parameters(), **options)
    distributed = DistributedOptimizer(optimizer_class, spread, **options)
    for batch in batches(3):
        plain.zero_grad()
        loss_of(local, batch).backward()
        plain.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(spread, batch)])
            distributed.step(context_id)
    assert_same_state(spread, local)


def train(model: nn.Module, optimizer: DistributedOptimizer, steps: int) -> None:
    for batch in batches(steps):
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(model, batch)])
            optimizer.step(context_id)


def train_locally(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for batch in batches(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def test_a_sparse_gradient_reaches_the_optimizer_as_it_is() -> None:
    local = nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2))
    remote = RemoteModule("worker1", ones_embedding)
    plain = optim.SparseAdam(local.parameters(), lr=0.1)
    distributed = DistributedOptimizer(optim.SparseAdam, remote, lr=0.1)
    rows = torch.tensor([1, 3, 3])
    for _ in range(2):
        plain.zero_grad()
        local(rows).square().sum().backward()
        plain.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [remote(rows).square().sum()])
            distributed.clip_grad_value_(context_id, 100.0)
            distributed.step(context_id)
    torch.testing.assert_close(remote.state_dict()["weight"], local.weight.detach())


def ones_embedding() -> nn.Module:
    return nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2))


def test_parameters_are_given_as_references_pairs_modules_or_tensors() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.1)
    mixed = [
        *spread.first.parameters(),
        *spread.middle.named_parameters(prefix="middle"),
        spread.last.weight,
        ("last.bias", spread.last.bias),
    ]
    distributed = DistributedOptimizer(optim.SGD, mixed, lr=0.1)
    train_locally(local, plain, 2)
    train(spread, distributed, 2)
    assert_same_state(spread, local)


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
    train_locally(local, plain, 3)
    train(spread, distributed, 3)
    assert_same_state(spread, local)
    assert [group["lr"] for group in distributed.param_groups] == [0.5, 0.1]


def test_a_group_added_later_may_live_on_a_new_worker() -> None:
    local, spread = Local(), Spread()
    plain = optim.Adam(local.first.parameters(), lr=0.1)
    distributed = DistributedOptimizer(optim.Adam, spread.first, lr=0.1)
    plain.add_param_group({"params": list(local.middle.parameters()), "lr": 0.2})
    plain.add_param_group({"params": list(local.last.parameters())})
    distributed.add_param_group({"params": spread.middle, "lr": 0.2})
    distributed.add_param_group({"params": spread.last})
    train_locally(local, plain, 2)
    train(spread, distributed, 2)
    assert_same_state(spread, local)


def one_cycle(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)


def warm_up_then_cosine(optimizer: optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])


def halved_each_step(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("make", [one_cycle, warm_up_then_cosine, halved_each_step])
def test_schedulers_change_the_options_on_every_owner(make: Any) -> None:
    local, spread = Local(), Spread()
    plain = optim.AdamW(local.parameters(), lr=0.05)
    distributed = DistributedOptimizer(optim.AdamW, spread, lr=0.05)
    schedule, plain_schedule = make(distributed), make(plain)
    for batch in batches(5):
        plain.zero_grad()
        loss_of(local, batch).backward()
        plain.step()
        plain_schedule.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(spread, batch)])
            distributed.step(context_id)
        schedule.step()
        assert distributed.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same_state(spread, local)


def test_the_order_of_a_norm_may_be_told_in_a_word_as_in_torch() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        by_word = optimizer.clip_grad_norm_(context_id, 1e9, "inf")  # type: ignore[arg-type]
        assert by_word == optimizer.clip_grad_norm_(context_id, 1e9, float("inf"))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_that_clips_is_that_of_all_workers(norm_type: float) -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.5)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.5)
    for batch in batches(3):
        plain.zero_grad()
        loss_of(local, batch).backward()
        expected = nn.utils.clip_grad_norm_(local.parameters(), 0.1, norm_type)
        plain.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(spread, batch)])
            norm = distributed.clip_grad_norm_(context_id, 0.1, norm_type)
            distributed.step(context_id)
        torch.testing.assert_close(norm, expected)
    assert_same_state(spread, local)


def test_clipping_by_norm_costs_one_call_per_owner_and_by_value_none() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        before = current_node().calls_made()
        optimizer.clip_grad_norm_(context_id, 1.0)
        assert current_node().calls_made() - before == 2
        optimizer.clip_grad_value_(context_id, 1.0)
        assert current_node().calls_made() - before == 2


def test_clipping_by_value_and_by_norm_apply_in_the_order_they_were_asked_for() -> None:
    local, spread = Local(), Spread()
    plain = optim.SGD(local.parameters(), lr=0.5)
    distributed = DistributedOptimizer(optim.SGD, spread, lr=0.5)
    (batch,) = batches(1)
    loss_of(local, batch).backward()
    nn.utils.clip_grad_value_(local.parameters(), 0.02)
    expected = nn.utils.clip_grad_norm_(local.parameters(), 0.05)
    plain.step()
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batch)])
        distributed.clip_grad_value_(context_id, 0.02)
        norm = distributed.clip_grad_norm_(context_id, 0.05)
        distributed.step(context_id)
    torch.testing.assert_close(norm, expected)
    assert_same_state(spread, local)


def test_a_norm_that_is_not_finite_names_the_parameter() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    spread.middle.run(spoil_bias)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        with pytest.raises(RuntimeError, match=r"non-finite.*on worker '(worker1|worker2|main)'"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)


def spoil_bias(module: nn.Module) -> None:
    with torch.no_grad():
        module.bias.fill_(float("nan"))  # type: ignore[operator]


class Tied(nn.Module):
    """Two layers on one worker that share their weight, which this process cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.one = RemoteModule("worker1", shared_layer)
        self.two = RemoteModule("worker1", shared_layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(self.one.lazy(x))
        return result


_shared: list[nn.Linear] = []


def shared_layer() -> nn.Linear:
    if not _shared:
        torch.manual_seed(0)
        _shared.append(nn.Linear(3, 3, bias=False))
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = _shared[0].weight
    return layer


@pytest.mark.parametrize("given", ["parent", "list"])
def test_a_weight_that_two_remote_modules_share_is_stepped_once(given: str) -> None:
    model = Tied()
    weight = model.one.state_dict()["weight"].clone().requires_grad_()
    params = model if given == "parent" else [model.one, model.two]
    optimizer = DistributedOptimizer(optim.SGD, params, lr=0.5, momentum=0.9)
    plain = optim.SGD([weight], lr=0.5, momentum=0.9)
    x = torch.ones(2, 3)
    for _ in range(2):
        plain.zero_grad()
        nn.functional.linear(nn.functional.linear(x, weight), weight).sum().backward()
        plain.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [model(x).sum()])
            optimizer.step(context_id)
    torch.testing.assert_close(model.two.state_dict()["weight"], weight.detach())


def test_hooks_of_the_state_run_as_in_torch() -> None:
    told: list[str] = []
    optimizer = DistributedOptimizer(optim.SGD, Spread(), lr=0.1)
    plain = optim.SGD(Local().parameters(), lr=0.1)
    for each in (plain, optimizer):
        each.register_state_dict_pre_hook(lambda _: told.append("before saving"))
        each.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
        each.register_load_state_dict_pre_hook(
            lambda _, state: told.append(f"before loading {state.pop('note')}")
        )
        each.register_load_state_dict_post_hook(lambda _: told.append("after loading"))
        state = each.state_dict()
        each.load_state_dict(state)
        assert state["note"] == 1
    assert told[:3] == ["before saving", "before loading 1", "after loading"]
    assert told[3:] == told[:3]


def test_a_step_neither_uses_nor_changes_grad() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    spread.last.weight.grad = torch.full_like(spread.last.weight, 1e6)
    train(spread, optimizer, 1)
    assert spread.last.weight.abs().max() < 10
    assert torch.all(spread.last.weight.grad == 1e6)


def test_parameters_without_gradient_stay_as_they_are() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.Adam, spread, lr=0.1, weight_decay=0.1)
    before = copy.deepcopy(spread.state_dict())
    with autograd.context() as context_id:
        autograd.backward(context_id, [spread.first(torch.ones(2, 6)).sum()])
        optimizer.step(context_id)
    after = spread.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"first.weight", "first.bias"}


STATEFUL: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adam, {"foreach": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Rprop, {"foreach": True}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), STATEFUL, ids=name_of)
def test_the_state_is_that_of_one_process_and_moves_both_ways(
    optimizer_class: Any, options: dict[str, Any]
) -> None:
    local, spread = Local(), Spread()
    plain = optimizer_class(local.named_parameters(), lr=0.1, **options)
    distributed = DistributedOptimizer(optimizer_class, spread, lr=0.1, **options)
    train_locally(local, plain, 2)
    train(spread, distributed, 2)
    state, expected = distributed.state_dict(), plain.state_dict()
    torch.testing.assert_close(state["state"], expected["state"])
    assert state["param_groups"] == expected["param_groups"]

    other_local, other_spread = Local(), Spread()
    other_local.load_state_dict(spread.state_dict())
    other_spread.load_state_dict(local.state_dict())
    other_plain = optimizer_class(other_local.named_parameters(), lr=1.0)
    other_plain.load_state_dict(state)
    other_distributed = DistributedOptimizer(optimizer_class, other_spread, lr=1.0)
    other_distributed.load_state_dict(expected)
    train_locally(other_local, other_plain, 2)
    train(other_spread, other_distributed, 2)
    assert_same_state(other_spread, other_local)


def test_a_state_that_was_loaded_is_not_shared_with_who_gave_it() -> None:
    spread, other = Spread(), Spread()
    options = {"lr": torch.tensor(0.1), "foreach": False}
    first = DistributedOptimizer(optim.Adam, spread, **options)
    second = DistributedOptimizer(optim.Adam, other, **options)
    train(spread, first, 1)
    given = first.state_dict()
    kept = copy.deepcopy(given)
    second.load_state_dict(given)
    train(other, second, 1)
    second.param_groups[0]["lr"].fill_(9.0)
    torch.testing.assert_close(given["state"], kept["state"], rtol=0, atol=0)
    assert given["param_groups"][0]["lr"] == kept["param_groups"][0]["lr"]


def test_a_state_of_other_groups_is_refused() -> None:
    optimizer = DistributedOptimizer(optim.Adam, Spread(), lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["params"].pop()
    with pytest.raises(
        ValueError, match=r"groups of \[5\] parameters, but this optimizer of \[6\]"
    ):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("hooked", [False, True])
def test_trainers_that_share_parameters_lose_no_update(hooked: bool) -> None:
    """Four trainers step at the same time; what each adds up can be told from the sum."""
    shared = RemoteModule("worker1", Weight)
    shared.run(hook_weight, hooked)
    scales = {1.0: "main", 16.0: "main", 256.0: "worker2", 4096.0: "worker2"}
    futures = [rpc.rpc_async(w, pull_down, (shared, s, 10)) for s, w in scales.items()]
    for future in futures:
        future.wait()
    assert torch.equal(shared.state_dict()["weight"], torch.full((50,), -10.0 * sum(scales)))


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50))

    def forward(self, scale: float) -> torch.Tensor:
        return self.weight.sum() * scale


def hook_weight(module: Weight, hooked: bool) -> None:
    """Passes put the gradient of a leaf with such a hook into `.grad` for a moment, too."""
    if hooked:
        module.weight.register_post_accumulate_grad_hook(lambda weight: None)


class Unhurried(optim.SGD):
    """Gives others the time to come between; notices if they do."""

    def step(self, closure: Any = None) -> Any:
        (weight,) = self.param_groups[0]["params"]
        given = weight.grad
        time.sleep(0.002)
        assert weight.grad is given, "somebody else's gradient"
        return super().step(closure)


def pull_down(shared: RemoteModule, scale: float, steps: int) -> None:
    optimizer = DistributedOptimizer(Unhurried, shared, lr=1.0)
    for _ in range(steps):
        with autograd.context() as context_id:
            autograd.backward(context_id, [shared(scale)])
            optimizer.step(context_id)


def test_hooks_and_repr_are_those_of_an_optimizer() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(spread, optimizer, 1)
    assert seen == ["before", "after"]
    assert "lr: 0.1" in repr(optimizer)


def test_whoever_listens_hears_of_a_step_whenever_they_came() -> None:
    """What is relied upon: torch leaves a step alone that is marked as wrapped (`hooked`)."""
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    assert not hasattr(inspect.unwrap(DistributedOptimizer.step), "hooked")
    assert DistributedOptimizer.step.__code__.co_name == "stepping"
    train(spread, optimizer, 1)
    seen: list[type] = []  # The optimizer of this worker's own parameters is heard, too.
    handles = [
        register_optimizer_step_pre_hook(lambda who, *_: seen.append(type(who))),
        register_optimizer_step_post_hook(lambda who, *_: seen.append(type(who))),
    ]
    try:
        train(spread, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert (seen[0], seen[-1]) == (DistributedOptimizer, DistributedOptimizer)
    assert seen.count(DistributedOptimizer) == 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(spread, optimizer, 1)
    names = [event.key for event in profile.key_averages()]
    assert names.count("Optimizer.step#DistributedOptimizer.step") == 1
