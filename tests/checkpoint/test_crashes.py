"""A crash while saving loses neither the checkpoint that was there nor the new one."""

from __future__ import annotations

import itertools
import os
import signal
import sys
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


FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir"}


def die_at(number: int, directory: Path) -> None:
    """Die before this worker's operation of that number on files of the directory."""
    left = itertools.count(number, -1)
    sync = os.fsync

    def strike() -> None:
        if next(left) == 0:
            die()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and str(directory) in str(args[0]):
            strike()

    def strike_and_sync(descriptor: int) -> None:
        strike()
        sync(descriptor)

    os.fsync = strike_and_sync  # type: ignore[assignment]
    sys.addaudithook(audit)


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


def make_local_module() -> None:
    made["layer0"] = Layer(*SIZES[0])  # type: ignore[assignment]


def test_a_driver_that_dies_at_any_operation_on_files_loses_neither(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The driver is killed before its first operation, its second, ... until a save ends."""
    found: list[set[float]] = []
    for number in itertools.count():
        path = tmp_path / str(number)
        doomed = make_job("main")["main"]
        doomed.do(make_local_module)
        doomed.do(fill, 1.0)
        doomed.do(save, path)
        doomed.do(fill, 2.0)
        doomed.do(die_at, number, path)
        try:
            doomed.do(save, path)
        except ConnectionError:
            survivor = make_job("main")["main"]
            survivor.do(make_local_module)
            found.append(survivor.do(load, path))
            assert survivor.do(save, path) == ""
            left = sorted(file.name for file in path.iterdir())
            assert len(left) == 2, f"metadata and one file, nothing of the save that died: {left}"
        else:
            break
    before, after = found.count({1.0}), found.count({2.0})
    print(f"died at {len(found)} operations: {before} times the old one, {after} times the new one")
    assert before >= 5
    assert after >= 2
    assert found == [{1.0}] * before + [{2.0}] * after, "never half, never back"


def test_a_worker_that_dies_at_any_operation_on_files_leaves_the_old_checkpoint(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    deaths = 0
    for number in itertools.count():
        path = tmp_path / str(number)
        job = make_job("main", "worker1")
        job["main"].do(make_modules, "worker1")
        job["main"].do(fill, 1.0)
        assert job["main"].do(save, path) == ""
        job["main"].do(fill, 2.0)
        job["worker1"].do(die_at, number, path)
        told = job["main"].do(save, path)
        if not told:
            break
        deaths += 1
        assert "worker 'worker1' could not write its part" in told
        survivor = make_job("main")["main"]
        survivor.do(make_local_module)
        assert survivor.do(load, path) == {1.0}
    assert deaths >= 2
