"""What goes wrong with checkpoints is told, and costs nothing that was there before."""

from __future__ import annotations

import pickle
import random
import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from telegrad import autograd, checkpoint, rpc
from telegrad.checkpoint import CheckpointError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, GradScaler
from tests.nn import modules

pytestmark = pytest.mark.usefixtures("workers")


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def linear(worker: str, seed: int, width: int = 4) -> RemoteModule:
    return RemoteModule(worker, modules.linear, (width, width, seed))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = linear("worker1", 0)


@pytest.mark.parametrize("other", ["remote", "local", "value"])
def test_two_contents_of_one_name_are_refused(other: str, tmp_path: Path) -> None:
    rival: dict[str, Any] = {
        "remote": {"parent.child": linear("worker2", 1)},
        "local": {"parent.child": nn.Linear(4, 4)},
        "value": {"parent.child.weight": 3},
    }[other]
    with pytest.raises(CheckpointError, match=r"under the name parent\.child\.weight"):
        checkpoint.save(tmp_path, {"parent": Parent(), **rival})
    assert not files(tmp_path)


@pytest.mark.parametrize("contents", [[1], {3: 1}, {"": 1}])
def test_contents_have_names(contents: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a dict from names"):
        checkpoint.save(tmp_path, contents)
    with pytest.raises(TypeError, match="a dict from names"):
        checkpoint.load(tmp_path, contents)


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"good": 1})
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=r"'main'.*bad cannot be pickled.*still there"):
        checkpoint.save(tmp_path, {"good": 2, "bad": threading.Lock()})
    assert files(tmp_path) == before
    assert checkpoint.load(tmp_path, {"good": 0}) == {"good": 1}


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"not saved.*FileExistsError"):
        checkpoint.save(tmp_path / "file", {"value": 1})


def bound_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture(params=["main", "worker1"])
def with_full_disk(request: pytest.FixtureRequest) -> Iterator[str]:
    """A worker that cannot write files as large as the part that it will have."""
    worker: str = request.param
    rpc.rpc_sync(worker, bound_files, (5000,))
    yield worker
    rpc.rpc_sync(worker, bound_files, (resource.RLIM_INFINITY,))


def test_a_full_disk_is_told_and_the_save_that_failed_leaves_nothing(
    with_full_disk: str, tmp_path: Path
) -> None:
    small = {"epoch": 1, "small": linear("worker1", 0)}
    checkpoint.save(tmp_path, small)
    before = files(tmp_path)
    large = {"here": nn.Linear(40, 40), "there": linear("worker1", 0, 40), "epoch": 2}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"'{with_full_disk}'.*OSError.*File too large"):
            checkpoint.save(tmp_path, large)
        assert files(tmp_path) == before
    assert checkpoint.load(tmp_path, small) == {"epoch": 1}


def test_a_flipped_bit_anywhere_is_told_and_nothing_changes(tmp_path: Path) -> None:
    module = linear("worker1", 0)
    checkpoint.save(tmp_path, {"module": module, "epoch": 1})
    zeros = {name: torch.zeros_like(v) for name, v in module.state_dict().items()}
    module.load_state_dict(zeros)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for file in tmp_path.glob("*.distcp"):
        intact = file.read_bytes()
        for place in dice.sample(range(len(intact)), 10):
            flipped = bytearray(intact)
            flipped[place] ^= 1 << dice.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match="not those that were written"):
                checkpoint.load(tmp_path, {"module": module, "epoch": 0})
        file.write_bytes(intact)
    torch.testing.assert_close(dict(module.state_dict()), zeros)
    assert checkpoint.load(tmp_path, {"module": module, "epoch": 0}) == {"epoch": 1}


@pytest.mark.parametrize("spoiled", [b"", b"\x80\x04", pickle.dumps({"state": 1})])
def test_damaged_metadata_is_told_and_the_next_save_is_good(spoiled: bytes, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"epoch": 1})
    (tmp_path / ".metadata").write_bytes(spoiled)
    with pytest.raises(CheckpointError, match=r"\.metadata.* is damaged"):
        checkpoint.load(tmp_path, {"epoch": 0})
    checkpoint.save(tmp_path, {"epoch": 2})
    assert checkpoint.load(tmp_path, {"epoch": 0}) == {"epoch": 2}
    assert len(files(tmp_path)) == 2


def test_saves_at_the_same_time_exclude_each_other_and_loads_see_one_of_them(
    tmp_path: Path,
) -> None:
    layers = [linear(worker, seed) for seed, worker in enumerate(("worker1", "worker2"))]
    weights = [layer.state_dict()["weight"] for layer in layers]
    checkpoint.save(tmp_path, {"layer": layers[0], "number": 0})
    told: list[str] = []

    def save_often(number: int) -> None:
        for _ in range(10):
            try:
                checkpoint.save(tmp_path, {"layer": layers[number], "number": number})
            except CheckpointError as error:
                told.append(str(error))

    threads = [threading.Thread(target=save_often, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    reader = linear("worker1", 9)
    last_look = False
    while not last_look:
        last_look = not any(thread.is_alive() for thread in threads)
        number = checkpoint.load(tmp_path, {"layer": reader, "number": None})["number"]
        torch.testing.assert_close(reader.state_dict()["weight"], weights[number], rtol=0, atol=0)
    assert all("Another save" in text for text in told), told
    assert len(files(tmp_path)) == 3


def trained() -> tuple[dict[str, object], DistributedOptimizer]:
    layers: dict[str, object] = {"one": linear("worker1", 0), "two": linear("worker2", 1)}
    optimizer = DistributedOptimizer(optim.Adam, list(layers.values()), lr=0.1)
    with autograd.context() as context_id:
        outputs = [layer(torch.ones(1, 4)).sum() for layer in layers.values()]  # type: ignore[operator]
        autograd.backward(context_id, outputs)
        optimizer.step(context_id)
    return layers, optimizer


def test_an_optimizer_under_other_names_is_told_and_not_left_empty(tmp_path: Path) -> None:
    layers, optimizer = trained()
    checkpoint.save(tmp_path, {**layers, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match=r"under the name adam"):
        checkpoint.load(tmp_path, {**layers, "adam": optimizer})
    with pytest.raises(CheckpointError, match=r"state\.0\.bias.*but under optimizer\.state\.one"):
        checkpoint.load(tmp_path, {"optimizer": optimizer})
    groups = [{"params": layer} for layer in layers.values()]
    other = DistributedOptimizer(optim.Adam, groups, lr=0.3)
    with pytest.raises(CheckpointError, match=r"has 1 parameter groups .* has 2"):
        checkpoint.load(tmp_path, {**layers, "optimizer": other})
    assert len(optimizer.state_dict()["state"]) == 4


def test_parameters_of_one_name_in_two_groups_are_kept_apart(tmp_path: Path) -> None:
    weights = [torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0)]
    groups = [{"params": [("weight", weight)]} for weight in weights]
    first, second = (DistributedOptimizer(optim.Adam, groups, lr=0.1) for _ in range(2))
    with autograd.context() as context_id:
        autograd.backward(context_id, [weight.square().sum() for weight in weights])
        first.step(context_id)
    checkpoint.save(tmp_path, {"optimizer": first})
    checkpoint.load(tmp_path, {"optimizer": second})
    torch.testing.assert_close(second.state_dict()["state"], first.state_dict()["state"])


KEPT: dict[str, Any] = {
    "milestones": Counter({2: 1, 4: 1}),
    "mixed": {1: 2, "1": 3, (2, 3): {}},
    "empty": {},
    "deep": [{"a": {}}, {}],
    "ordered": OrderedDict(b=1, a=OrderedDict()),
}


def test_containers_come_back_as_they_were(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, KEPT)
    loaded = checkpoint.load(tmp_path, dict.fromkeys(KEPT))
    assert loaded == KEPT
    for name, value in KEPT.items():
        assert type(loaded[name]) is type(value)
    assert type(loaded["ordered"]["a"]) is OrderedDict


def test_a_schedule_and_an_optimizer_of_torch_go_on_where_they_were(tmp_path: Path) -> None:
    def made() -> tuple[nn.Linear, optim.Adam, optim.lr_scheduler.MultiStepLR]:
        torch.manual_seed(0)
        layer = nn.Linear(2, 2)
        optimizer = optim.Adam(layer.parameters(), lr=1.0)
        return layer, optimizer, optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    def go(layer: nn.Linear, optimizer: optim.Adam, schedule: Any) -> list[float]:
        rates = []
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    before = made()
    go(*before)
    names = ("layer", "optimizer", "schedule")
    checkpoint.save(tmp_path, dict(zip(names, before, strict=True)))
    expected = go(*before)
    after = made()
    checkpoint.load(tmp_path, dict(zip(names, after, strict=True)))
    assert go(*after) == expected
    torch.testing.assert_close(dict(after[0].state_dict()), dict(before[0].state_dict()))


def test_what_is_switched_off_can_be_loaded_again(tmp_path: Path) -> None:
    for scaler in (GradScaler(enabled=False), torch.amp.GradScaler("cpu", enabled=False)):
        checkpoint.save(tmp_path, {"scaler": scaler})
        checkpoint.load(tmp_path, {"scaler": scaler})


def test_an_optimizer_that_the_checkpoint_lacks_keeps_its_state(tmp_path: Path) -> None:
    layers, optimizer = trained()
    checkpoint.save(tmp_path, layers)
    before = optimizer.state_dict()
    checkpoint.load(tmp_path, {**layers, "optimizer": optimizer}, strict=False)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"])
    assert len(before["state"]) == 4


def test_a_parameter_that_the_checkpoint_lacks_keeps_its_state(tmp_path: Path) -> None:
    layers, optimizer = trained()
    one, two = layers.values()
    fewer = DistributedOptimizer(optim.Adam, one, lr=0.1)
    checkpoint.save(tmp_path, {"one": one, "optimizer": fewer})
    before = optimizer.state_dict()["state"]
    checkpoint.load(tmp_path, {"one": one, "two": two, "optimizer": optimizer}, strict=False)
    after = optimizer.state_dict()["state"]
    assert set(after) == {2, 3}, "the state of the first module was saved, as none"
    torch.testing.assert_close(after, {index: before[index] for index in after})


def test_a_content_that_looks_like_a_group_is_none(tmp_path: Path) -> None:
    layers, optimizer = trained()
    contents = {**layers, "optimizer": optimizer, "optimizer.param_groups.note": 3}
    checkpoint.save(tmp_path, contents)
    assert checkpoint.load(tmp_path, contents) == {"optimizer.param_groups.note": 3}


def test_a_group_gets_the_options_of_the_group_with_the_same_parameters(tmp_path: Path) -> None:
    one, two = linear("worker1", 0), linear("worker2", 1)
    modules_of_both = {"one": one, "two": two}
    groups = [{"params": one, "lr": 0.5}, {"params": two, "lr": 0.0}]
    saved = DistributedOptimizer(optim.SGD, groups, lr=1.0)
    checkpoint.save(tmp_path, {**modules_of_both, "optimizer": saved})
    other_order = DistributedOptimizer(optim.SGD, [{"params": two}, {"params": one}], lr=1.0)
    checkpoint.load(tmp_path, {**modules_of_both, "optimizer": other_order})
    assert [group["lr"] for group in other_order.param_groups] == [0.0, 0.5]

    (weight, bias) = (rref for _, rref in one.named_parameters())
    others = [{"params": [weight]}, {"params": [bias, *two.parameters()]}]
    regrouped = DistributedOptimizer(optim.SGD, others, lr=1.0)
    with pytest.raises(CheckpointError, match=r"no parameter group .* one\.weight\. Form"):
        checkpoint.load(tmp_path, {**modules_of_both, "optimizer": regrouped})
    checkpoint.load(tmp_path, {**modules_of_both, "optimizer": regrouped}, strict=False)
    assert [group["lr"] for group in regrouped.param_groups] == [1.0, 1.0]


class Dotted(optim.SGD):
    """Has state under a name with a dot."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["ema.slow"] = parameter.detach().clone()
        return super().step(closure)


def test_state_under_a_name_with_a_dot_is_loaded_too(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    saved, other = (DistributedOptimizer(Dotted, [weight], lr=0.1) for _ in range(2))
    with autograd.context() as context_id:
        autograd.backward(context_id, [weight.sum()])
        saved.step(context_id)
    checkpoint.save(tmp_path, {"optimizer": saved})
    checkpoint.load(tmp_path, {"optimizer": other})
    torch.testing.assert_close(other.state_dict()["state"][0]["ema.slow"], torch.ones(2))


class Stubborn(nn.Module):
    """Gives a state that it does not take."""

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        raise ArithmeticError("not this one")


def test_a_module_that_refuses_its_state_is_named_with_its_worker(tmp_path: Path) -> None:
    contents = {"stubborn": RemoteModule("worker1", Stubborn)}
    checkpoint.save(tmp_path, contents)
    with pytest.raises(CheckpointError, match=r"stubborn on worker 'worker1' does not take .* not"):
        checkpoint.load(tmp_path, contents)


def test_what_has_no_place_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    with pytest.raises(CheckpointError, match=r"'main' could not .*lazy\.weight has no shape yet"):
        checkpoint.save(tmp_path, {"lazy": lazy})
    sparse = nn.Module()
    sparse.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match=r"graph\.edges is a tensor of the layout"):
        checkpoint.save(tmp_path, {"graph": sparse})


def test_files_of_others_stay_where_they_are(tmp_path: Path) -> None:
    for _ in range(2):
        checkpoint.save(tmp_path, {"value": 1})
        (tmp_path / "mine.distcp").write_bytes(b"mine")
    checkpoint.save(tmp_path, {"value": 1})
    assert (tmp_path / "mine.distcp").read_bytes() == b"mine"
    assert len(files(tmp_path)) == 3
