"""Read a checkpoint: every worker what it needs, at once, and nothing changes unless all could.

Each worker asks for the names of what lives there now, whoever wrote them. It reads into fresh
tensors; when every worker has read, all take over what they read. So a checkpoint that is damaged
or does not fit leaves the job as it was.

A checkpoint is made of pickles, as torch makes them: load only what you trust.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from telegrad.checkpoint.files import (
    METADATA,
    Checksums,
    check,
    noted_checksums,
    read_metadata,
)
from telegrad.checkpoint.parts import (
    Part,
    Table,
    apply,
    check_contents,
    divide,
    driver_objects,
    optimizer_names,
    table_of,
)
from telegrad.checkpoint.saving import DEFAULT_TIMEOUT
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.rpc import RRef, get_worker_info, rpc_async
from telegrad.rpc.outside import outside_of_graphs

_TRIES = 5


@outside_of_graphs
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
    check_contents(contents)
    directory = Path(path).absolute()
    own, others, values = _staged(directory, contents, strict, timeout)
    for future in [rref.rpc_async(timeout).apply() for rref in others]:
        future.wait()
    own.apply()
    return _restore(contents, values)


def _staged(
    directory: Path, contents: Mapping[str, object], strict: bool, timeout: float
) -> tuple[Staged, list[RRef[Staged]], Table]:
    """Everything, read and not yet taken over.

    A save that ends meanwhile removes the files of the checkpoint that was there before. Then the
    new one is read.
    """
    for _ in range(_TRIES):
        state = _state(directory)
        try:
            return _stage_all(directory, contents, strict, timeout)
        except CheckpointError:
            if _state(directory) == state:
                raise
    return _stage_all(directory, contents, strict, timeout)


def _state(directory: Path) -> tuple[int, int] | None:
    """Another one means that another checkpoint was put in place."""
    try:
        found = (directory / METADATA).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _stage_all(
    directory: Path, contents: Mapping[str, object], strict: bool, timeout: float
) -> tuple[Staged, list[RRef[Staged]], Table]:
    metadata = read_metadata(directory)
    stored = Stored(str(directory), metadata, noted_checksums(metadata))
    if strict:
        _check_groups(contents, metadata)
    here = get_worker_info().name
    parts = divide(contents)
    others = [worker for worker in parts if worker != here]
    reading = [rpc_async(w, _stage, (parts[w], stored, strict), timeout=timeout) for w in others]
    objects = driver_objects(contents)
    own = Staged(parts[here], stored, strict)
    values = _read(stored, _wanted_objects(objects, contents, metadata, strict))
    answers = [future.wait() for future in reading]
    if strict:
        _check_states(contents, metadata, [own.optimizer_names, *(names for _, names in answers)])
    return own, [rref for rref, _ in answers], values


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint on disk."""

    directory: str
    metadata: Metadata
    checksums: Checksums


@outside_of_graphs
def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a complete checkpoint: whether `load` would find one.

    epoch = load("run/last", contents)["epoch"] + 1 if exists("run/last") else 0
    """
    return (Path(path) / METADATA).exists()


class Staged:
    """On the worker: its part as it was read, before anything is changed."""

    def __init__(self, part: Part, stored: Stored, strict: bool) -> None:
        self._part = part
        metadata = stored.metadata
        self.optimizer_names = [
            prefix for name in part.optimizers for prefix in optimizer_names(name, part).values()
        ]
        """Under what the optimizers of this worker have their state."""
        fitting = table_of(part)
        optimizers = [f"{name}.state." for name in part.optimizers]
        required = {n: v for n, v in fitting.items() if not n.startswith(tuple(optimizers))}
        names = [*_present(required, metadata, strict), *self._optimizer_keys(metadata)]
        self._table = _read(stored, names)
        _check_shapes(fitting, self._table)

    def _optimizer_keys(self, metadata: Metadata) -> list[str]:
        """What there is of the state of this worker's parameters; a fresh optimizer has none."""
        prefixes = set(self.optimizer_names)
        return [key for key in metadata.state_dict_metadata if key.rpartition(".")[0] in prefixes]

    def apply(self) -> None:
        apply(self._part, self._table)


def _stage(part: Part, stored: Stored, strict: bool) -> tuple[RRef[Staged], list[str]]:
    staged = Staged(part, stored, strict)
    return RRef(staged), staged.optimizer_names


def _optimizers(contents: Mapping[str, object]) -> dict[str, DistributedOptimizer]:
    return {n: c for n, c in contents.items() if isinstance(c, DistributedOptimizer)}


def _check_groups(contents: Mapping[str, object], metadata: Metadata) -> None:
    for name, optimizer in _optimizers(contents).items():
        keys = [k for k in metadata.state_dict_metadata if k.startswith(f"{name}.param_groups.")]
        groups = {key.removeprefix(f"{name}.param_groups.").partition(".")[0] for key in keys}
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"The checkpoint has {len(groups) or 'no'} parameter groups of an optimizer under "
                f"the name {name}, but the one that is to be loaded has "
                f"{len(optimizer.param_groups)}."
            )


def _check_states(
    contents: Mapping[str, object], metadata: Metadata, answers: list[list[str]]
) -> None:
    """A parameter that never had a gradient has no state. But if there is state for which there is
    no parameter, too, then the names are others."""
    wanted = {name for answer in answers for name in answer}
    for name in _optimizers(contents):
        lead = f"{name}.state."
        stored = {k.rpartition(".")[0] for k in metadata.state_dict_metadata if k.startswith(lead)}
        lacking = sorted(n for n in wanted - stored if n.startswith(lead))
        if lacking and stored - wanted:
            raise CheckpointError(
                f"The checkpoint has nothing under the names {_listed(lacking)}, but under "
                f"{_listed(sorted(stored - wanted))}. Parameters of an optimizer are named after "
                "the modules of the checkpoint: load these together with it, under the names under "
                "which they were saved, or load with strict=False."
            )


def _present(names: Iterable[str], metadata: Metadata, strict: bool) -> list[str]:
    names = list(names)
    missing = [name for name in names if name not in metadata.state_dict_metadata]
    if missing and strict:
        raise CheckpointError(
            f"The checkpoint has nothing under the names {_listed(missing)}, which worker "
            f"{get_worker_info().name!r} needs. Save under the same names, or load with "
            "strict=False."
        )
    return [name for name in names if name in metadata.state_dict_metadata]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")


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


def _read(stored: Stored, names: Iterable[str]) -> Table:
    directory, metadata = stored.directory, stored.metadata
    table: Table = {name: _room_for(metadata.state_dict_metadata[name]) for name in names}
    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(table, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    try:
        check(Path(directory), table, metadata, stored.checksums)
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except Exception as error:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"The checkpoint in {directory} cannot be read on worker {get_worker_info().name!r}: "
            f"{kind}{error}"
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
