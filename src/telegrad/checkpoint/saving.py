"""Write a checkpoint: every worker its own part, at once, and all of it or nothing.

The format is that of `torch.distributed.checkpoint`, made by torch's own planners and writers; what
they do over a process group is done here over calls. Each worker plans its part, the driver joins
the plans, each worker writes its part into files of its own, the driver writes `.metadata`, which
says where everything is.

**Why a crash loses nothing.** Files of a save have names that no other save uses, so those of the
checkpoint that is already there are not touched. When all are on disk, `.metadata` is put in place
by one rename. Before it the directory is the old checkpoint, after it the new one. Files that the
`.metadata` in place does not mention are left-overs, of the old checkpoint or of a save that did
not end, and the next save that does end removes them.

What must never happen: that a file which `.metadata` mentions is changed or removed.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from telegrad.checkpoint.errors import CheckpointError
from telegrad.checkpoint.parts import Part, divide, driver_objects, table_of
from telegrad.rpc import RRef, get_worker_info, rpc_async

DEFAULT_TIMEOUT = 600.0
METADATA = ".metadata"
_SUFFIX = ".distcp"
_PENDING = ".pending-"


@dataclass(frozen=True, slots=True)
class FilePrefix:
    """What torch's writer puts in front of the names of a worker's files."""

    prefix: str


def whole_values_planner() -> DefaultSavePlanner:
    """A planner that leaves containers whole: their items have no names of their own."""
    return DefaultSavePlanner(flatten_state_dict=False)


class PartWriter:
    """On the worker: one part, planned and not yet written."""

    def __init__(self, table: Mapping[str, Any], directory: str) -> None:
        self._planner = whole_values_planner()
        self._planner.set_up_planner(dict(table))
        self._writer = FileSystemWriter(directory)
        self._writer.set_up_storage_writer(is_coordinator=False)

    def plan(self) -> SavePlan:
        return self._planner.create_local_plan()

    def write(self, plan: SavePlan) -> list[WriteResult]:
        written = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        results: list[WriteResult] = written.wait()
        return results


def _open_writer(part: Part, directory: str) -> tuple[RRef[PartWriter], SavePlan]:
    writer = PartWriter(table_of(part), directory)
    return RRef(writer), writer.plan()


def save(
    path: str | os.PathLike[str],
    contents: Mapping[str, object],
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Save modules, optimizers and values of the whole job into one directory.

        save("run/last", {"encoder": encoder, "model": model, "optimizer": optimizer, "epoch": 3})

    Contents are modules (remote, local, or local with remote ones inside), DistributedOptimizers,
    whatever has a `state_dict` (schedulers, scalers), and plain values. Every worker that has a
    part of them must see the directory. What was saved there before stays until all of the new
    checkpoint is on disk. `timeout` bounds each worker's writing in seconds.
    """
    directory = Path(path).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:12]
    here = get_worker_info().name
    parts = divide(contents)
    others = [worker for worker in parts if worker != here]
    opening = {
        w: rpc_async(w, _open_writer, (parts[w], str(directory)), timeout=timeout) for w in others
    }
    own = PartWriter({**table_of(parts[here]), **driver_objects(contents)}, str(directory))
    opened = {worker: _of(worker, future) for worker, future in opening.items()}
    plans, metadata = _join_plans([own.plan(), *(opened[worker][1] for worker in others)], token)
    writing = [
        (worker, opened[worker][0].rpc_async(timeout).write(plan))
        for worker, plan in zip(others, plans[1:], strict=True)
    ]
    results = [own.write(plans[0]), *(_of(worker, future) for worker, future in writing)]
    _commit(directory, token, metadata, results)
    remove_leftovers(directory)


def _of(worker: str, future: Any) -> Any:
    try:
        return future.wait()
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint was not saved: worker {worker!r} could not write its part "
            f"({type(error).__name__}: {error}). The checkpoint that was there before, if any, is "
            "still there."
        ) from error


def _join_plans(plans: list[SavePlan], token: str) -> tuple[list[SavePlan], Metadata]:
    joined, metadata = whole_values_planner().create_global_plan(plans)
    # Where each value sits in a state_dict: tools of torch that read all there is look it up.
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    placed = [
        dataclasses.replace(plan, storage_data=FilePrefix(f"{token}_{number}_"))
        for number, plan in enumerate(joined)
    ]
    return placed, metadata


def _commit(
    directory: Path, token: str, metadata: Metadata, results: list[list[WriteResult]]
) -> None:
    # torch's writer removes a .metadata that is there before it puts its own: let it do so aside.
    pending = directory / f"{_PENDING}{token}"
    pending.mkdir()
    writer = FileSystemWriter(pending)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, results)
    _sync_directory(directory)
    os.replace(pending / METADATA, directory / METADATA)
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Remove files of checkpoints that the `.metadata` in place does not mention."""
    with (directory / METADATA).open("rb") as stream:
        metadata = pickle.load(stream)
    mentioned = {info.relative_path for info in metadata.storage_data.values()}
    for file in directory.glob(f"*{_SUFFIX}"):
        if file.name not in mentioned:
            file.unlink(missing_ok=True)
    for pending in directory.glob(f"{_PENDING}*"):
        shutil.rmtree(pending, ignore_errors=True)
