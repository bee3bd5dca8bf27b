"""Write a checkpoint: every worker its own part, at once, and all of it or nothing.

The format is that of `torch.distributed.checkpoint`, made by torch's own planners and writers; what
they do over a process group is done here over calls. Each worker plans its part, the driver joins
the plans, each worker writes its part into files of its own, the driver writes `.metadata`, which
says where everything is.

**Why a crash loses nothing.** Files of a save have names that no other save uses, so those of the
checkpoint that is already there are not touched. When all are on disk, `.metadata` is put in place
by one rename. Before it the directory is the old checkpoint, after it the new one. Files that the
`.metadata` in place does not mention are left-overs, of the old checkpoint or of a save that did
not end, and every save removes them, when it begins and when it ends (files.py).

What must never happen: that a file which `.metadata` mentions is changed or removed.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.nn.parameter import is_lazy

from telegrad.checkpoint.errors import CheckpointError
from telegrad.checkpoint.files import (
    METADATA,
    PENDING,
    Checksums,
    alone_in,
    checksums_of,
    note_checksums,
    remove_leftovers,
    sync_directory,
)
from telegrad.checkpoint.parts import (
    ParameterNames,
    Part,
    Table,
    check_contents,
    divide,
    driver_objects,
    joined,
    members_of_groups,
    merged,
    optimizer_names,
    table_of,
)
from telegrad.rpc import RRef, WorkerLost, get_worker_info, rpc_async
from telegrad.rpc.outside import outside_of_graphs

DEFAULT_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class FilePrefix:
    """What torch's writer puts in front of the names of a worker's files."""

    prefix: str


def whole_values_planner() -> DefaultSavePlanner:
    """A planner that leaves containers whole: their items have no names of their own."""
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class PartWriter:
    """On the worker: one part, planned and not yet written."""

    def __init__(self, table: Mapping[str, Any], directory: str) -> None:
        self._table = dict(table)
        self._directory = directory
        self._planner = whole_values_planner()
        self._planner.set_up_planner(self._table)
        self._writer = FileSystemWriter(directory)
        self._writer.set_up_storage_writer(is_coordinator=False)

    def plan(self) -> SavePlan:
        for name, value in self._table.items():
            if isinstance(value, Tensor):
                _check_storable(name, value)
        return self._planner.create_local_plan()

    def write(self, plan: SavePlan) -> Written:
        try:
            future = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
            results: list[WriteResult] = future.wait()
            infos = [result.storage_data for result in results]
            return Written(results, checksums_of(Path(self._directory), infos))
        except Exception as error:
            raise CheckpointError(self._why(error)) from error

    def _why(self, error: BaseException) -> str:
        """What went wrong, in words that help: torch's writer tells of a full disk by positions."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError):
                return f"{type(cause).__name__}: {cause}"
            cause = cause.__cause__ or cause.__context__
        for name, value in self._table.items():
            if not isinstance(value, Tensor) and (told := _unpicklable(value)):
                return f"{name} cannot be pickled: {told}"
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Written:
    """Where each value of a part is, and what its bytes come to."""

    results: list[WriteResult]
    checksums: Checksums


def _check_storable(name: str, tensor: Tensor) -> None:
    """That the format has a place for a tensor."""
    if is_lazy(tensor):
        raise CheckpointError(f"{name} has no shape yet: run its module once before it is saved")
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{name} is a tensor of the layout {tensor.layout}, and torch.distributed.checkpoint "
            "stores dense ones only"
        )


def _unpicklable(value: object) -> str:
    try:
        pickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _open_writer(part: Part, directory: str) -> tuple[RRef[PartWriter], SavePlan, ParameterNames]:
    writer = PartWriter(table_of(part), directory)
    return RRef(writer), writer.plan(), optimizer_names(part)


@outside_of_graphs
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
    check_contents(contents)
    directory = Path(path).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with alone_in(directory):
            remove_leftovers(directory)
            try:
                _save(directory, contents, timeout)
            finally:
                remove_leftovers(directory)
    except WorkerLost as loss:
        raise _not_saved(f"worker {loss.worker!r} is gone", loss) from loss
    except OSError as error:
        raise _not_saved(f"worker {get_worker_info().name!r} failed", error) from error


def _save(directory: Path, contents: Mapping[str, object], timeout: float) -> None:
    token = uuid.uuid4().hex[:12]
    here = get_worker_info().name
    parts = divide(contents)
    others = [worker for worker in parts if worker != here]
    opening = {
        w: rpc_async(w, _open_writer, (parts[w], str(directory)), timeout=timeout) for w in others
    }
    table = joined(table_of(parts[here]), driver_objects(contents))
    opened = _all_of({worker: future.wait for worker, future in opening.items()})
    names = merged([optimizer_names(parts[here]), *(opened[worker][2] for worker in others)])
    own = PartWriter(joined(table, members_of_groups(contents, names)), str(directory))
    plan = _all_of({here: own.plan})[here]
    plans, metadata = _join_plans([plan, *(opened[worker][1] for worker in others)], token)
    writing = {
        worker: opened[worker][0].rpc_async(timeout).write(plan).wait
        for worker, plan in zip(others, plans[1:], strict=True)
    }
    written = _all_of({here: partial(own.write, plans[0]), **writing})
    _commit(directory, token, metadata, list(written.values()))


def _all_of(waits: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each worker answers. Who failed is told when no other writes any more."""
    answers: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    for worker, wait in waits.items():
        try:
            answers[worker] = wait()
        except Exception as error:
            failed[worker] = error
    for worker, cause in failed.items():
        raise _not_saved(f"worker {worker!r} could not write its part", cause) from cause
    return answers


def _not_saved(what: str, error: Exception) -> CheckpointError:
    why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"The checkpoint was not saved: {what} ({why}). The checkpoint that was there before, if "
        "any, is still there."
    )


def _join_plans(plans: list[SavePlan], token: str) -> tuple[list[SavePlan], Metadata]:
    names: Table = {}
    for plan in plans:
        names = joined(names, {item.index.fqn: None for item in plan.items})
    joint, metadata = whole_values_planner().create_global_plan(plans)
    # Where each value sits in a state_dict: tools of torch that read all there is look it up.
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    placed = [
        dataclasses.replace(plan, storage_data=FilePrefix(f"{token}_{number}_"))
        for number, plan in enumerate(joint)
    ]
    return placed, metadata


def _commit(directory: Path, token: str, metadata: Metadata, written: list[Written]) -> None:
    # torch's writer removes a .metadata that is there before it puts its own: let it do so aside.
    pending = directory / f"{PENDING}{token}"
    pending.mkdir()
    writer = FileSystemWriter(pending)
    writer.set_up_storage_writer(is_coordinator=True)
    note_checksums(metadata, {k: v for part in written for k, v in part.checksums.items()})
    writer.finish(metadata, [part.results for part in written])
    sync_directory(directory)
    os.replace(pending / METADATA, directory / METADATA)
    sync_directory(directory)
