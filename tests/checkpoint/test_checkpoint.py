"""Save and load the whole job, in torch.distributed.checkpoint's format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from telegrad import autograd, checkpoint
from telegrad.checkpoint import CheckpointError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, GradScaler
from tests.nn import modules
from tests.optim.models import SIZES, Layer, Local, Spread, batches, loss_of

pytestmark = [
    pytest.mark.usefixtures("workers"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class OnOneWorker(nn.Module):
    """The model of `Spread`, otherwise distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(*SIZES[0])
        self.middle = RemoteModule("worker1", Layer, SIZES[1])
        self.last = RemoteModule("worker1", Layer, SIZES[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle.lazy(self.first(x)))
        return result


def train(model: nn.Module, optimizer: DistributedOptimizer, data: list[Any]) -> None:
    for batch in data:
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(model, batch)])
            optimizer.step(context_id)


def spoil(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("other", [Spread, OnOneWorker])
def test_training_goes_on_where_it_was_on_any_distribution(other: Any, tmp_path: Path) -> None:
    data = batches(4)
    local = Local()
    plain = optim.Adam(local.parameters(), lr=0.05, amsgrad=True)
    schedule = optim.lr_scheduler.ExponentialLR(plain, 0.5)
    for number, batch in enumerate(data):
        plain.zero_grad()
        loss_of(local, batch).backward()
        plain.step()
        if number == 1:
            schedule.step()

    model = Spread()
    optimizer = DistributedOptimizer(optim.Adam, model, lr=0.05, amsgrad=True)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, data[:2])
    schedule.step()
    checkpoint.save(
        tmp_path,
        {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": {"number": [2]}},
    )

    resumed = other()
    spoil(resumed)
    optimizer = DistributedOptimizer(optim.Adam, resumed, lr=1.0, amsgrad=True)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    values = checkpoint.load(
        tmp_path,
        {"model": resumed, "optimizer": optimizer, "schedule": schedule, "epoch": None},
    )
    assert values == {"epoch": {"number": [2]}}
    assert schedule.last_epoch == 1
    train(resumed, optimizer, data[2:])
    torch.testing.assert_close(dict(resumed.state_dict()), dict(local.state_dict()))


def test_each_worker_writes_a_file_of_its_own_and_the_next_save_replaces_them(
    tmp_path: Path,
) -> None:
    model = Spread()
    checkpoint.save(tmp_path, {"model": model})
    first = {file.name for file in tmp_path.iterdir()}
    assert len(first - {".metadata"}) == 3, "main, worker1 and worker2"
    checkpoint.save(tmp_path, {"model": model})
    second = {file.name for file in tmp_path.iterdir()}
    assert first & second == {".metadata"}
    assert len(second) == len(first)


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.Adam, model, lr=0.05)
    train(model, optimizer, batches(1))
    checkpoint.save(tmp_path / "ours", {"model": model, "optimizer": optimizer})

    local = Local()
    into = {"model": local.state_dict()}
    dcp.load(into, checkpoint_id=tmp_path / "ours", no_dist=True)
    torch.testing.assert_close(dict(local.state_dict()), dict(model.state_dict()))

    dcp_to_torch_save(tmp_path / "ours", tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=False)
    expected = optimizer.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(whole["optimizer.state.model.first.weight.exp_avg"], expected)
    assert whole["optimizer.param_groups.0.lr"] == 0.05


def test_we_read_what_torch_writes(tmp_path: Path) -> None:
    local = Local()
    dcp.save({"model": local.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    model = Spread()
    spoil(model)
    checkpoint.load(tmp_path, {"model": model})
    torch.testing.assert_close(dict(model.state_dict()), dict(local.state_dict()))


def test_buffers_and_extra_state_are_part_of_it(tmp_path: Path) -> None:
    mixed = RemoteModule("worker1", modules.mixed, (1,))
    counts = RemoteModule("worker2", modules.Counts, (7,))
    mixed(torch.randn(4, 3))
    scaler = GradScaler(init_scale=2.0)
    contents: dict[str, object] = {"mixed": mixed, "counts": counts, "scaler": scaler}
    checkpoint.save(tmp_path, contents)
    other_mixed = RemoteModule("worker2", modules.mixed, (2,))
    other_counts = RemoteModule("worker1", modules.Counts, (0,))
    other_scaler = GradScaler()
    checkpoint.load(
        tmp_path, {"mixed": other_mixed, "counts": other_counts, "scaler": other_scaler}
    )
    torch.testing.assert_close(other_mixed.state_dict(), mixed.state_dict())
    assert other_counts() == {"calls": [7]}
    assert other_scaler.get_scale() == 2.0


def test_what_was_saved_by_the_same_version_is_not_taken_for_old(tmp_path: Path) -> None:
    module = RemoteModule("worker1", modules.versioned)
    checkpoint.save(tmp_path, {"module": module})
    checkpoint.load(tmp_path, {"module": module})
    assert float(module.state_dict()["0.weight"].sum()) == 2.0


def test_what_is_missing_is_named_and_nothing_changes(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.ModuleDict({"first": Layer(*SIZES[0])})})
    model = Spread()
    spoil(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"nothing under the names model\.(middle|last)"):
        checkpoint.load(tmp_path, {"model": model})
    torch.testing.assert_close(dict(model.state_dict()), dict(before))
    checkpoint.load(tmp_path, {"model": model}, strict=False)
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"first.weight", "first.bias"}


def test_a_damaged_file_is_told_and_nothing_changes(tmp_path: Path) -> None:
    model = Spread()
    checkpoint.save(tmp_path, {"model": model})
    spoil(model)
    before = copy.deepcopy(model.state_dict())
    file = sorted(tmp_path.glob("*.distcp"))[-1]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read on worker 'worker2'"):
        checkpoint.load(tmp_path, {"model": model})
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"layer": Layer(4, 3, 0)})
    remote = RemoteModule("worker1", Layer, (5, 3, 0))
    with pytest.raises(CheckpointError, match=r"layer\.weight has the shape \(3, 4\).*worker1"):
        checkpoint.load(tmp_path, {"layer": remote})


def test_a_checkpoint_exists_from_the_first_save_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert not checkpoint.exists(path)
    path.mkdir()
    assert not checkpoint.exists(path)
    checkpoint.save(path, {"epoch": 1})
    assert checkpoint.exists(path)
    assert checkpoint.exists(str(path))


def test_workers_without_state_and_modules_under_two_names_are_no_obstacle(tmp_path: Path) -> None:
    silent = RemoteModule("worker2", nn.ReLU)
    layer = RemoteModule("worker1", Layer, SIZES[0])
    optimizer = DistributedOptimizer(optim.SGD, layer, lr=0.1)
    contents: dict[str, object] = {
        "silent": silent,
        "one": layer,
        "other": layer,
        "optimizer": optimizer,
    }
    checkpoint.save(tmp_path, contents)
    expected = layer.state_dict()
    spoil(layer)
    checkpoint.load(tmp_path, contents)
    torch.testing.assert_close(layer.state_dict(), expected)


def test_a_directory_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.load(tmp_path, {})


def test_parameters_in_no_module_are_named_by_the_optimizer(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = DistributedOptimizer(optim.Adam, [("w", weight)], lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [weight.square().sum()])
        optimizer.step(context_id)
    checkpoint.save(tmp_path, {"optimizer": optimizer, "w": weight})
    fresh = DistributedOptimizer(optim.Adam, [("w", weight)], lr=0.1)
    values = checkpoint.load(tmp_path, {"optimizer": fresh, "w": None})
    torch.testing.assert_close(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    torch.testing.assert_close(values["w"], weight.detach())
