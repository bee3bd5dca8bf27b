"""A crash while saving loses neither the checkpoint that was there nor the new one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import checkpoint, rpc
from telegrad.checkpoint import CheckpointError
from telegrad.nn import RemoteModule
from tests.nn.job import nursery
from tests.optim.models import SIZES, Layer
from tests.rpc.fleet import Job

made: dict[str, RemoteModule] = {}


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*names: str) -> Job:
        jobs.append(Job(nursery(), names))
        return jobs[-1]

    yield make
    for job in jobs:
        job.abandon()


def make_modules(*workers: str) -> None:
    for number, worker in enumerate(workers):
        made[f"layer{number}"] = RemoteModule(worker, Layer, SIZES[number])


def fill(value: float) -> None:
    for module in made.values():
        state = {name: torch.full_like(t, value) for name, t in module.state_dict().items()}
        module.load_state_dict(state)


def save(path: Path) -> str:
    """What went wrong, or nothing."""
    try:
        checkpoint.save(path, made)
    except CheckpointError as error:
        return str(error)
    return ""


def load(path: Path) -> set[float]:
    """The values that all elements have after loading."""
    checkpoint.load(path, made)
    tensors = [t for module in made.values() for t in module.state_dict().values()]
    return {float(value) for tensor in tensors for value in tensor.flatten()}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_its_file_is_to_be_synced() -> None:
    os.fsync = die


def die_before_the_new_checkpoint_is_put_in_place() -> None:
    os.replace = die


def die_after_the_new_checkpoint_is_put_in_place() -> None:
    replace = os.replace

    def replace_and_die(*args: Any) -> None:
        replace(*args)
        die()

    os.replace = replace_and_die  # type: ignore[assignment]


def arm(worker: str, weapon: Callable[[], None]) -> None:
    rpc.rpc_sync(worker, weapon)


def begin(job: Job, path: Path) -> None:
    job["main"].do(make_modules, "worker1", "worker2")
    job["main"].do(fill, 1.0)
    assert job["main"].do(save, path) == ""
    job["main"].do(fill, 2.0)


def test_a_worker_that_dies_while_it_writes_leaves_the_old_checkpoint(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job("main", "worker1", "worker2")
    begin(job, tmp_path)
    job["main"].do(arm, "worker2", die_when_its_file_is_to_be_synced)
    told = job["main"].do(save, tmp_path)
    assert "worker 'worker2' could not write its part" in told
    assert "still there" in told

    smaller = make_job("main", "worker1")
    smaller["main"].do(make_modules, "worker1", "worker1")
    assert smaller["main"].do(load, tmp_path) == {1.0}
    assert smaller["main"].do(save, tmp_path) == ""
    left = {file.name for file in tmp_path.iterdir()}
    assert len(left) == 2, f"the metadata and the file of worker1, no left-overs: {left}"


@pytest.mark.parametrize(
    ("weapon", "expected"),
    [
        (die_before_the_new_checkpoint_is_put_in_place, {1.0}),
        (die_after_the_new_checkpoint_is_put_in_place, {2.0}),
    ],
)
def test_a_driver_that_dies_leaves_the_old_or_the_new_checkpoint(
    make_job: Callable[..., Job],
    tmp_path: Path,
    weapon: Callable[[], None],
    expected: set[float],
) -> None:
    job = make_job("main", "worker1", "worker2")
    begin(job, tmp_path)
    job["main"].do(weapon)
    with pytest.raises(ConnectionError):
        job["main"].do(save, tmp_path)

    again = make_job("main", "worker1", "worker2")
    again["main"].do(make_modules, "worker1", "worker2")
    assert again["main"].do(load, tmp_path) == expected
