"""Read a checkpoint: every worker what it needs, at once, and nothing changes unless all could.

Each worker asks for the names of what lives there now, whoever wrote them. It reads into fresh
tensors; when every worker has read, all take over what they read. So a checkpoint that is damaged
or does not fit leaves the job as it was.

A checkpoint is made of pickles, as torch makes them: load only what you trust.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from telegrad.checkpoint.errors import CheckpointError
from telegrad.checkpoint.parts import (
    Part,
    Table,
    apply,
    divide,
    driver_objects,
    optimizer_names,
    table_of,
)
from telegrad.checkpoint.saving import DEFAULT_TIMEOUT, METADATA
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.rpc import RRef, get_worker_info, rpc_async


def load(
    path: str | os.PathLike[str],
    contents: Mapping[str, object],
    *,
    strict: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
) -> dict[str, Any]:
    """Load what `save` or `torch.distributed.checkpoint.save` wrote, wherever it now belongs.

        values = load("run/last", {"model": model, "optimizer": optimizer, "epoch": 0})
        first_epoch = values["epoch"] + 1

    Modules, optimizers and all that has a `load_state_dict` are brought to the state that was
    saved under their name. Plain values are returned. With `strict` a name that the checkpoint
    lacks is an error; otherwise what it was to be loaded into stays as it is.
    """
    directory = Path(path).absolute()
    metadata = _metadata(directory)
    here = get_worker_info().name
    parts = divide(contents)
    others = [worker for worker in parts if worker != here]
    asked = (str(directory), metadata, strict)
    reading = {w: rpc_async(w, _stage, (parts[w], *asked), timeout=timeout) for w in others}
    objects = driver_objects(contents)
    own = Staged(parts[here], *asked)
    values = _read(str(directory), metadata, _wanted_objects(objects, contents, metadata, strict))
    staged = [reading[worker].wait() for worker in others]
    for future in [rref.rpc_async(timeout).apply() for rref in staged]:
        future.wait()
    own.apply()
    return _restore(contents, values)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a complete checkpoint: whether `load` would find one.

    epoch = load("run/last", contents)["epoch"] + 1 if exists("run/last") else 0
    """
    return (Path(path) / METADATA).exists()


class Staged:
    """On the worker: its part as it was read, before anything is changed."""

    def __init__(self, part: Part, directory: str, metadata: Metadata, strict: bool) -> None:
        self._part = part
        fitting = table_of(part)
        optimizers = [f"{name}.state." for name in part.optimizers]
        required = {n: v for n, v in fitting.items() if not n.startswith(tuple(optimizers))}
        names = [*_present(required, metadata, strict), *_optimizer_keys(part, metadata)]
        self._table = _read(directory, metadata, names)
        _check_shapes(fitting, self._table)

    def apply(self) -> None:
        apply(self._part, self._table)


def _stage(part: Part, directory: str, metadata: Metadata, strict: bool) -> RRef[Staged]:
    return RRef(Staged(part, directory, metadata, strict))


def _metadata(directory: Path) -> Metadata:
    if not exists(directory):
        raise CheckpointError(
            f"{directory} has no complete checkpoint: no save to it has ended, or it is not the "
            "directory that was given to save."
        )
    metadata: Metadata = FileSystemReader(directory).read_metadata()
    return metadata


def _present(names: Iterable[str], metadata: Metadata, strict: bool) -> list[str]:
    names = list(names)
    missing = [name for name in names if name not in metadata.state_dict_metadata]
    if missing and strict:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise CheckpointError(
            f"The checkpoint has nothing under the names {shown}, which worker "
            f"{get_worker_info().name!r} needs. Save under the same names, or load with "
            "strict=False."
        )
    return [name for name in names if name in metadata.state_dict_metadata]


def _optimizer_keys(part: Part, metadata: Metadata) -> list[str]:
    """What there is of the state of this worker's parameters; a fresh optimizer has none yet."""
    prefixes = {
        prefix for name in part.optimizers for prefix in optimizer_names(name, part).values()
    }
    return [key for key in metadata.state_dict_metadata if key.rpartition(".")[0] in prefixes]


def _wanted_objects(
    objects: Table, contents: Mapping[str, object], metadata: Metadata, strict: bool
) -> list[str]:
    """The driver's names; an option that the checkpoint lacks keeps the value it has here."""
    optimizers = tuple(
        f"{name}.param_groups."
        for name, content in contents.items()
        if isinstance(content, DistributedOptimizer)
    )
    options = [name for name in objects if name.startswith(optimizers)] if optimizers else []
    required = [name for name in objects if name not in options]
    return [*_present(required, metadata, strict), *_present(options, metadata, strict=False)]


def _read(directory: str, metadata: Metadata, names: Iterable[str]) -> Table:
    table: Table = {name: _room_for(metadata.state_dict_metadata[name]) for name in names}
    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(table, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint in {directory} cannot be read on worker {get_worker_info().name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return table


def _room_for(kind: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    if isinstance(kind, TensorStorageMetadata):
        return torch.empty(kind.size, dtype=kind.properties.dtype)
    return None


def _check_shapes(fitting: Table, loaded: Table) -> None:
    for name, value in loaded.items():
        wanted = fitting.get(name)
        if isinstance(wanted, Tensor) and isinstance(value, Tensor) and wanted.shape != value.shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(value.shape)} in the checkpoint, but "
                f"{tuple(wanted.shape)} on worker {get_worker_info().name!r}."
            )


def _restore(contents: Mapping[str, object], values: Table) -> dict[str, Any]:
    """Bring the driver's own objects to what was saved; returns the plain values."""
    plain: dict[str, Any] = {}
    for name, content in contents.items():
        if isinstance(content, DistributedOptimizer):
            content.resume(_options_below(f"{name}.param_groups.", values))
        elif name in values:
            restore = getattr(content, "load_state_dict", None)
            if restore is None:
                plain[name] = values[name]
            else:
                restore(values[name])
    return plain


def _options_below(prefix: str, values: Table) -> dict[int, dict[str, Any]]:
    options: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        if name.startswith(prefix):
            index, _, key = name.removeprefix(prefix).partition(".")
            options.setdefault(int(index), {})[key] = value
    return options
