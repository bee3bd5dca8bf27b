"""A RemoteModule is a module: used as if it were here, equal to what it would be here."""

from __future__ import annotations

import copy
import pickle
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import autograd, checkpoint, rpc
from telegrad.nn import Lazy, RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.nn import modules

pytestmark = pytest.mark.usefixtures("workers")


def pair(seed: int = 3) -> tuple[nn.Module, RemoteModule]:
    return modules.linear(4, 2, seed), RemoteModule("worker1", modules.linear, (4, 2, seed))


def x(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(11))


# Calling.


def test_a_call_gives_what_the_module_would_give_here() -> None:
    local, remote = pair()
    torch.testing.assert_close(remote(x()), local(x()).detach())
    torch.testing.assert_close(remote.forward_async(x()).wait(), local(x()).detach())
    torch.testing.assert_close(remote.lazy(x()).to_here(), local(x()).detach())


@pytest.mark.parametrize("name", ["self", "function", "rref", "timeout"])
def test_a_keyword_argument_may_have_any_name(name: str) -> None:
    _, remote = pair()
    named: dict[str, Any] = {name: 1}
    assert remote.run(names_of, **named) == [name]
    assert remote.lazy(x()).then(names_of, **named).to_here() == [name]


def names_of(value: Any, /, **kwargs: Any) -> list[str]:
    return sorted(kwargs)


def test_what_a_module_gives_in_inference_mode_can_be_changed_outside_of_it() -> None:
    local, remote = pair()
    with torch.inference_mode():
        outputs = remote(x()), remote.forward_async(x()).wait(), remote.lazy(x()).to_here()
    for output in outputs:
        torch.testing.assert_close(output.add_(1), local(x()).detach() + 1)


def test_gradients_are_those_of_one_process() -> None:
    local, remote = pair()
    here, there = x().requires_grad_(), x().requires_grad_()
    local(here).square().sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote(there).square().sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)
        weights = remote.run(gradients_of, context_id)
    torch.testing.assert_close(weights, [p.grad for p in local.parameters()])


def gradients_of(module: nn.Module, context_id: int) -> list[torch.Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[p] for p in module.parameters()]


def test_containers_and_lazy_values_inside_of_them_are_arguments() -> None:
    attend = RemoteModule("worker2", modules.Attend)
    _, remote = pair()
    lazy = remote.lazy(x())
    value = lazy.to_here()
    found = attend((lazy, torch.ones(3, 2)), more={"x": lazy})
    torch.testing.assert_close(found["sum"], value + 1 + value)
    torch.testing.assert_close(found["product"], value)


ARGUMENTS = {
    "a tensor twice": lambda lazy, here: (here, here, lazy),
    "a lazy value twice": lambda lazy, here: (lazy, here, lazy),
    "a parameter": lambda lazy, here: (nn.Parameter(torch.ones(3, 2)), lazy, here),
    "very many": lambda lazy, here: (*(torch.ones(3, 2) for _ in range(255)), lazy, here),
}


@pytest.mark.parametrize("worker", ["worker1", "worker2", "main"])
@pytest.mark.parametrize("way", ["called", "lazy"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_modules_are_given_what_lazy_arguments_stand_for(kind: str, way: str, worker: str) -> None:
    _, remote = pair()
    sums = RemoteModule(worker, modules.Sums)
    with autograd.context() as context_id:
        here = torch.ones(3, 2, requires_grad=True)
        lazy = remote.lazy(x())
        given = ARGUMENTS[kind](lazy, here)
        found = sums(*given) if way == "called" else sums.lazy(*given).to_here()
        value = lazy.to_here()
        expected = sum(value if each is lazy else each for each in given)
        torch.testing.assert_close(found, expected)
        autograd.backward(context_id, [found.sum()])
        times = float(sum(each is here for each in given))
        gradient = autograd.get_gradients(context_id)[here]
        torch.testing.assert_close(gradient, torch.full((3, 2), times))


@pytest.mark.parametrize("recording", [True, False])
def test_grad_mode_of_the_caller_holds_on_the_worker(recording: bool) -> None:
    modes = RemoteModule("worker1", modules.GradModes)
    with autograd.context(), torch.set_grad_enabled(recording):
        assert modes(torch.ones(1))[0] is recording
    assert modes(torch.ones(1))[0] is False, "outside of a context nothing could come back"


def test_an_error_of_the_module_is_raised_where_its_result_is_asked_for() -> None:
    fails = RemoteModule("worker1", modules.Fails)
    with pytest.raises(ArithmeticError, match="no result today"):
        fails(x())
    with pytest.raises(ArithmeticError, match="no result today"):
        fails.lazy(x()).to_here()
    _, remote = pair()
    with pytest.raises(ArithmeticError, match="no result today"):
        remote(fails.lazy(x()))


def test_a_module_can_be_compiled_where_it_lives() -> None:
    plain = RemoteModule("worker1", modules.IsCompiled)
    compiled = RemoteModule("worker1", modules.IsCompiled, compile={"backend": "eager"})
    assert torch.equal(plain(torch.ones(3)), torch.ones(3))
    start = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [compiled(start).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[start], torch.full((3,), 2.0))
    assert list(compiled.state_dict()) == ["weight"]


def test_what_makes_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="made a dict"):
        RemoteModule("worker1", dict)
    with pytest.raises(RuntimeError, match="nowhere"):
        RemoteModule("nowhere", nn.Identity)


# Lazy results.


def test_activations_between_two_remote_modules_do_not_pass_through_the_caller() -> None:
    width = 1 << 18
    first = RemoteModule("worker1", modules.Wide, (width,))
    second = RemoteModule("worker2", modules.Wide, (width,))
    start = torch.ones(1, requires_grad=True)

    def round_trip(lazy: bool) -> int:
        before = modules.bytes_moved()
        with autograd.context() as context_id:
            middle = first.lazy(start) if lazy else first(start)
            autograd.backward(context_id, [second(middle)])
            gradient = autograd.get_gradients(context_id)[start]
        torch.testing.assert_close(gradient, torch.full((1,), 0.25))
        return modules.bytes_moved() - before

    activation = width * 4
    through_here, past_here = round_trip(lazy=False), round_trip(lazy=True)
    print(f"bytes at the caller: {past_here} lazily, {through_here} otherwise")
    assert past_here < 10_000 < 4 * activation <= through_here


def test_a_chain_of_lazy_calls_keeps_what_it_needs_and_no_more() -> None:
    """Each value is only lent to the next call, and goes when that call has ended."""
    layers = [RemoteModule(worker, modules.Doubles) for worker in ("worker1", "worker2")]
    before = [kept_on(worker) for worker in ("worker1", "worker2")]
    value: Any = torch.ones(1)
    for _ in range(10):
        for layer in layers:
            value = layer.lazy([value])
    assert value.to_here().item() == 2.0**20
    deadline = time.monotonic() + 20
    # Fewer are well, too: at first there may have been what another test had just let go.
    while kept_on("worker1") > before[0] or kept_on("worker2") > before[1] + 1:
        assert time.monotonic() < deadline, "only the last value is still wanted"


def kept_on(worker: str) -> int:
    return int(rpc.rpc_sync(worker, modules.values_kept))


def test_then_goes_on_where_the_value_is() -> None:
    local, remote = pair()
    target = torch.zeros(3, 2)
    here = x().requires_grad_()
    nn.functional.mse_loss(local(here), target).backward()
    there = x().requires_grad_()
    with autograd.context() as context_id:
        loss = remote.lazy(there).then(nn.functional.mse_loss, target)
        assert isinstance(loss, Lazy)
        assert loss.owner.name == "worker1"
        loss.backward(context_id)
        torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)


# As a module among modules.


def test_parameters_are_references_with_names() -> None:
    local, remote = pair()
    found = dict(remote.named_parameters(prefix="layer"))
    assert list(found) == ["layer.weight", "layer.bias"]
    assert all(rref.owner_name() == "worker1" for rref in found.values())
    torch.testing.assert_close(
        [rref.to_here().detach() for rref in remote.parameters()],
        [p.detach() for p in local.parameters()],
    )


def test_buffers_are_references_with_names() -> None:
    remote = RemoteModule("worker1", modules.mixed, (1,))
    found = {name: rref.to_here() for name, rref in remote.named_buffers(prefix="layer")}
    expected = {f"layer.{name}": b for name, b in modules.mixed(1).named_buffers()}
    torch.testing.assert_close(found, expected)
    assert len(list(remote.buffers())) == len(expected)


def test_a_deep_copy_is_another_module_on_the_same_worker() -> None:
    _, remote = pair()
    parent = nn.Sequential(nn.Identity(), remote).eval()
    twin = copy.deepcopy(parent)
    assert twin[1].owner == remote.owner
    assert not twin[1].training
    remote.apply(modules.fill_with_ones)
    assert not torch.equal(twin(x()), parent(x()))
    torch.testing.assert_close(twin(x()), pair()[0](x()).detach())


def test_outside_of_calls_it_is_not_pickled() -> None:
    _, remote = pair()
    with pytest.raises(TypeError, match=r"RemoteModule\(on worker1\) cannot be pickled"):
        pickle.dumps(nn.Sequential(remote))


def test_state_of_a_parent_includes_that_of_the_remote_child() -> None:
    local = nn.ModuleDict({"a": nn.Linear(2, 2), "b": modules.mixed(1)})
    spread = nn.ModuleDict(
        {"a": nn.Linear(2, 2), "b": RemoteModule("worker1", modules.mixed, (2,))}
    )
    assert list(spread.state_dict()) == list(local.state_dict())
    spread.load_state_dict(local.state_dict())
    torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))


def test_names_that_do_not_match_are_told_as_torch_tells_them() -> None:
    parent = nn.ModuleDict({"b": RemoteModule("worker1", modules.linear, (2, 2, 0))})
    state = dict(parent.state_dict())
    state["b.extra"] = state.pop("b.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*b\.bias.*\n.*Unexpected key.*b\.extra"):
        parent.load_state_dict(state)
    found = parent.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["b.bias"], ["b.extra"])
    state["b.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"on worker 'worker1'.*\n.*size mismatch"):
        parent.load_state_dict(state, strict=False)


def test_train_and_eval_of_a_parent_reach_the_remote_child() -> None:
    remote = RemoteModule("worker1", modules.mixed, (1,))
    parent = nn.Sequential(remote)
    parent.eval()
    assert not remote.training
    inputs = torch.ones(2, 3)
    assert torch.equal(parent(inputs), parent(inputs)), "dropout must be off"
    parent.train()
    assert remote.run(is_training)


def is_training(module: nn.Module) -> bool:
    return all(part.training for part in module.modules())


def test_conversions_of_a_parent_reach_the_remote_child_but_for_its_integers() -> None:
    remote = RemoteModule("worker1", modules.mixed, (1,))
    expected = modules.mixed(1).double().state_dict()
    nn.Sequential(remote).double()
    torch.testing.assert_close(remote.state_dict(), dict(expected))
    remote.to(torch.float32)
    assert remote.state_dict()["0.weight"].dtype is torch.float32


def test_a_device_can_be_named_with_the_worker() -> None:
    remote = RemoteModule("worker1/meta", modules.linear, (4, 2, 0))
    assert remote.run(device_of) == "meta"
    assert remote(x()).is_meta


def device_of(module: nn.Module) -> str:
    return next(module.parameters()).device.type


def test_requires_grad_and_zero_grad_act_on_the_worker() -> None:
    _, remote = pair()
    remote.requires_grad_(False)
    assert remote.run(flags) == [False, False]
    remote.requires_grad_()
    remote.run(set_grad)
    assert remote.run(has_grad)
    remote.zero_grad()
    assert not remote.run(has_grad)


def flags(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module.parameters()]


def set_grad(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = torch.ones_like(p)


def has_grad(module: nn.Module) -> bool:
    return any(p.grad is not None for p in module.parameters())


def test_apply_of_a_parent_reaches_the_remote_child() -> None:
    _, remote = pair()
    nn.Sequential(remote).apply(modules.fill_with_ones)
    assert torch.equal(remote.state_dict()["weight"], torch.ones(2, 4))


def test_it_can_be_sent_to_another_worker_alone_or_inside_of_a_module() -> None:
    local, remote = pair()
    expected = local(x()).detach()
    torch.testing.assert_close(rpc.rpc_sync("worker2", modules.call_it, (remote, x())), expected)
    parent = nn.Sequential(nn.Identity(), remote)
    torch.testing.assert_close(rpc.rpc_sync("worker2", modules.call_it, (parent, x())), expected)
    torch.testing.assert_close(rpc.rpc_sync("worker1", modules.call_it, (remote, x())), expected)


def test_hooks_run_at_the_caller_or_where_the_module_lives() -> None:
    _, remote = pair()
    rpc.rpc_sync("worker1", modules.take_seen)
    remote.run(modules.register)
    here: list[Any] = []
    remote.register_forward_hook(lambda module, args, output: here.append(tuple(output.shape)))
    remote.register_full_backward_hook(lambda m, gi, go: here.append((gi[0].shape, go[0].shape)))
    with autograd.context() as context_id:
        autograd.backward(context_id, [remote(x().requires_grad_()).sum()])
    assert here == [(3, 2), (torch.Size([3, 4]), torch.Size([3, 2]))]
    assert rpc.rpc_sync("worker1", modules.take_seen) == [("forward", (3, 2)), ("backward", (3, 2))]


def test_it_says_where_it_is() -> None:
    assert repr(RemoteModule("worker2", nn.Identity)) == "RemoteModule(on worker2)"


def test_the_module_goes_when_the_last_face_of_it_goes() -> None:
    rpc.rpc_sync("worker1", modules.take_seen)
    remote = RemoteModule("worker1", modules.Mortal)
    del remote
    assert rpc.rpc_sync("worker1", modules.await_death)


def test_named_tuples_and_dicts_of_any_class_may_hold_lazy_values() -> None:
    double, couples = (
        RemoteModule("worker1", modules.Doubles),
        RemoteModule("worker2", modules.Couples),
    )
    x = torch.ones(2)
    named = OrderedDict(x=double.lazy(x))
    found = couples(modules.Couple(double.lazy(x), x), named)
    assert type(found) is modules.Couple
    torch.testing.assert_close(tuple(found), (3 * x, 2 * x))
    assert isinstance(named["x"], Lazy), "the caller's container is left alone"


@pytest.mark.parametrize("nested", [False, True])
def test_versions_of_modules_travel_with_their_state(nested: bool) -> None:
    remote: nn.Module = RemoteModule("worker1", modules.versioned)
    local = modules.versioned()
    if nested:
        remote, local = nn.Sequential(remote), nn.Sequential(local)
    remote.load_state_dict(remote.state_dict())
    local.load_state_dict(remote.state_dict())
    for state in (remote.state_dict(), local.state_dict()):
        assert [float(v.sum()) for v in state.values()] == [2.0]
    remote.load_state_dict(dict(remote.state_dict()))
    assert [float(v.sum()) for v in remote.state_dict().values()] == [4.0], "as torch would"


def test_a_subclass_keeps_its_class_and_attributes_when_copied_or_sent() -> None:
    module = modules.Tagged("worker1", modules.linear, (2, 2, 0))
    module.tag = "mine"
    copied = copy.deepcopy(nn.Sequential(module))[0]
    assert type(copied) is modules.Tagged
    assert copied.tag == "mine"
    assert copied != module
    tag, found = rpc.rpc_sync("worker2", modules.tag_and_call, (module, torch.ones(1, 2)))
    assert tag == "mine"
    torch.testing.assert_close(found, module(torch.ones(1, 2)))
    with pytest.raises(RuntimeError, match="only be pickled when using RPC"):
        pickle.dumps(module)


@pytest.mark.parametrize(
    ("args", "options", "told"),
    [
        ((3, nn.Linear, (2, 2)), {}, "3 names no worker"),
        (("worker1", nn.ReLU()), {}, "needs the class ReLU"),
        (("worker1", nn.Linear, 2), {}, "The arguments of Linear are a tuple and a dict"),
        (("worker1", nn.Linear, (2, 2)), {"kwargs": 3}, "are a tuple and a dict"),
        (("worker1", nn.Linear, (2, 2)), {"compile": "yes"}, "compile='yes'"),
    ],
)
def test_arguments_that_make_no_module_are_told(args: Any, options: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        RemoteModule(*args, **options)


def test_a_remote_module_inside_of_a_remote_one_is_a_part_of_it(tmp_path: Path) -> None:
    holder = RemoteModule("worker1", modules.Holder, ("worker2",))
    names = [name for name, _ in holder.named_parameters()]
    assert names == ["here.weight", "here.bias", "there.weight", "there.bias"]
    assert set(holder.state_dict()) == set(names)
    assert {rref.owner_name() for rref in holder.parameters()} == {"worker1", "worker2"}

    before = {name: value.clone() for name, value in holder.state_dict().items()}
    optimizer = DistributedOptimizer(torch.optim.Adam, holder, lr=0.1)
    checkpoint.save(tmp_path, {"holder": holder})
    with autograd.context() as context_id:
        autograd.backward(context_id, [holder(torch.ones(1, 2)).sum()])
        optimizer.step(context_id)
    stepped = holder.state_dict()
    assert not any(torch.equal(stepped[name], before[name]) for name in names)
    checkpoint.save(tmp_path / "stepped", {"holder": holder, "optimizer": optimizer})
    checkpoint.load(tmp_path, {"holder": holder})
    torch.testing.assert_close(dict(holder.state_dict()), before)
    checkpoint.load(tmp_path / "stepped", {"holder": holder, "optimizer": optimizer})
    torch.testing.assert_close(dict(holder.state_dict()), dict(stepped))

    holder.requires_grad_(False)
    with autograd.context() as context_id:
        assert not holder(torch.ones(1, 2)).requires_grad


def test_a_named_tuple_that_is_made_in_its_own_way_arrives() -> None:
    given = modules.Pinned(torch.ones(2))
    doubled, name = RemoteModule("worker1", modules.Named)(given)
    assert name == "pinned"
    torch.testing.assert_close(doubled, torch.full((2,), 2.0))
    lazy = RemoteModule("worker2", modules.Sums).lazy(torch.ones(2))
    (doubled, _) = RemoteModule("worker1", modules.Named)(given._replace(x=lazy))
    torch.testing.assert_close(doubled, torch.full((2,), 2.0))


@pytest.mark.parametrize("way", ["itself", "parent"])
def test_inputs_follow_a_module_to_another_device(way: str) -> None:
    module = RemoteModule("worker1", modules.Devices)
    assert module(x()) == ["cpu"]
    (module if way == "itself" else nn.Sequential(module)).to("meta")
    assert module(x()) == ["meta"]
    assert module(OrderedDict(a=x())) == ["meta"]
    assert module(modules.Pinned(x())._replace(name=x())) == ["meta", "meta"]


def test_the_parameters_of_nested_remote_modules_are_in_the_order_of_torch() -> None:
    holder = RemoteModule("worker1", modules.HolderOfFirst, ("worker2",))
    names = [name for name, _ in holder.named_parameters()]
    assert names == [name for name in holder.state_dict() if name in names]
    assert names[-1] == "here.weight"
    holder.double()
    dtypes = {value.dtype for value in holder.state_dict().values()}
    assert dtypes == {torch.float64, torch.int64}


def test_a_remote_module_may_be_all_that_a_remote_one_is(tmp_path: Path) -> None:
    module = RemoteModule("worker1", modules.remote_one, ("worker2",))
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    optimizer = DistributedOptimizer(torch.optim.SGD, module, lr=0.1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    checkpoint.save(tmp_path, {"module": module, "optimizer": optimizer})
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
        optimizer.step(context_id)
    assert not torch.equal(module.state_dict()["weight"], before["weight"])
    checkpoint.load(tmp_path, {"module": module, "optimizer": optimizer})
    torch.testing.assert_close(dict(module.state_dict()), before)


def test_remote_modules_that_hold_each_other_are_refused(tmp_path: Path) -> None:
    one = RemoteModule("worker1", modules.linear, (2, 2, 0))
    two = RemoteModule("worker2", modules.linear, (2, 2, 0))
    one.run(modules.hold, two)
    two.run(modules.hold, one)
    try:
        for ask in (
            lambda: list(one.named_parameters()),
            lambda: one.requires_grad_(False),
            lambda: checkpoint.save(tmp_path, {"one": one}),
        ):
            with pytest.raises(Exception, match="inside of itself"):
                ask()
    finally:
        one.run(delattr, "other")
