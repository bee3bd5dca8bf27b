"""A process group is taken down after the reducers that use it, not by them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def ends_of_a_model_and_its_group() -> list[str]:
    """In the order in which they end, after the group was destroyed."""
    ended: list[str] = []
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=dist.new_group())
    weakref.finalize(model.process_group, ended.append, "group")
    weakref.finalize(model.reducer, ended.append, "reducer")
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    del model
    return ended


@pytest.mark.usefixtures("process_group", "installed")
def test_the_group_of_a_model_ends_after_its_reducer() -> None:
    assert ends_of_a_model_and_its_group() == ["reducer", "group"]


@pytest.mark.usefixtures("process_group")
def test_stock_leaves_the_group_to_the_reducer() -> None:
    """If this fails, torch has mended it and `telegrad.compat.reducers` can go."""
    assert ends_of_a_model_and_its_group() == ["group", "reducer"]


@pytest.mark.usefixtures("process_group")
def test_weak_references_are_called_when_the_reducer_in_cpp_is_gone() -> None:
    layer = torch.nn.Linear(2, 2)
    holders: list[int] = []
    model = DistributedDataParallel(layer)
    weakref.finalize(model.reducer, lambda: holders.append(layer.weight._use_count()))
    assert layer.weight._use_count() > 1
    del model
    assert holders == [1]
