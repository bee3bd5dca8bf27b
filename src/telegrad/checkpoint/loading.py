"""Read a checkpoint: every worker what it needs, at once, and nothing changes unless all could.

Each worker asks for the names of what lives there now, whoever wrote them. It reads into fresh
tensors; when every worker has read, all take over what they read. So a checkpoint that is damaged
or does not fit leaves the job as it was. What can still fail then is code of the job itself: a
module, or whatever has a `load_state_dict`, that does not take what was saved under its name.

A checkpoint is made of pickles, as torch makes them: load only what you trust.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
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
    REFUSES,
    ParameterNames,
    Part,
    Table,
    apply,
    check_contents,
    divide,
    driver_objects,
    lead_of,
    members_of_groups,
    merged,
    named,
    optimizer_names,
    state_lead,
    table_of,
)
from telegrad.checkpoint.saving import DEFAULT_TIMEOUT
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.options import Options
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
    own, others, values, options = _staged(directory, contents, strict, timeout)
    applying = [rref.rpc_async(timeout).apply() for rref in others]
    try:
        own.apply()
    finally:
        torch.futures.wait_all(applying)
    return _restore(contents, values, options)


Loaded = tuple["Staged", list[RRef["Staged"]], Table, dict[str, dict[int, Options]]]
"""The part of this worker and those of others, the driver's values, and of each optimizer that the
checkpoint knows the options of its groups."""


def _staged(
    directory: Path, contents: Mapping[str, object], strict: bool, timeout: float
) -> Loaded:
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
) -> Loaded:
    metadata = read_metadata(directory)
    stored = Stored(str(directory), metadata, noted_checksums(metadata))
    here = get_worker_info().name
    parts = divide(contents)
    others = [worker for worker in parts if worker != here]
    reading = [rpc_async(w, _stage, (parts[w], stored, strict), timeout=timeout) for w in others]
    own = Staged(parts[here], stored, strict)
    optimizers = _optimizers(contents)
    values = _read(stored, _wanted_objects(driver_objects(contents), optimizers, metadata, strict))
    stored_groups = _stored_groups(stored, optimizers)
    answers = [future.wait() for future in reading]
    names = merged([own.names, *(answer for _, answer in answers)])
    if strict:
        _check_states(metadata, names)
    own_groups = members_of_groups(contents, names)
    options = {
        name: _options_for(name, optimizer, stored_groups[name], own_groups, strict)
        for name, optimizer in optimizers.items()
        if stored_groups[name] or strict
    }
    return own, [rref for rref, _ in answers], values, options


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
        self.names = optimizer_names(part)
        groups = _stored_groups(stored, self.names)
        self._known = {
            name: _members(groups[name]) for name in self.names if _knows(metadata, name)
        }
        fitting = table_of(part)
        optimizers = tuple(f"{name}.state." for name in self.names)
        required = [n for n in fitting if not n.startswith(optimizers)]
        names = [*_present(required, metadata, strict), *self._optimizer_keys(metadata)]
        self._table = _read(stored, names)
        _check_shapes(fitting, self._table)

    def _optimizer_keys(self, metadata: Metadata) -> list[str]:
        """What there is of the state of this worker's parameters; a fresh optimizer has none."""
        leads = _leads(self.names)
        return [key for key in metadata.state_dict_metadata if lead_of(key, leads)]

    def apply(self) -> None:
        apply(self._part, self._table, self._known)


def _stage(part: Part, stored: Stored, strict: bool) -> tuple[RRef[Staged], ParameterNames]:
    staged = Staged(part, stored, strict)
    return RRef(staged), staged.names


def _leads(names: ParameterNames) -> set[str]:
    return {state_lead(name, each) for name, known in names.items() for each in known.values()}


def _knows(metadata: Metadata, optimizer: str) -> bool:
    """Whether a checkpoint has anything of an optimizer; of one that never stepped, its options."""
    leads = (f"{optimizer}.param_groups.", f"{optimizer}.state.")
    return any(key.startswith(leads) for key in metadata.state_dict_metadata)


def _optimizers(contents: Mapping[str, object]) -> dict[str, DistributedOptimizer]:
    return {n: c for n, c in contents.items() if isinstance(c, DistributedOptimizer)}


def _stored_groups(
    stored: Stored, optimizers: Collection[str]
) -> dict[str, dict[int, dict[str, Any]]]:
    """The groups of each optimizer as they were saved: options, and the names of parameters."""
    places: dict[str, tuple[str, int, str]] = {}
    for name in optimizers:
        for key in stored.metadata.state_dict_metadata:
            if found := _place_in_group(key, name):
                places[key] = name, *found
    values = _read(stored, places)
    groups: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in optimizers}
    for key, (name, place, option) in places.items():
        groups[name].setdefault(place, {})[option] = values[key]
    return groups


def _members(groups: Mapping[int, Mapping[str, Any]]) -> set[str] | None:
    """The names of the parameters in all groups, if the checkpoint has them."""
    lists = [group["params"] for group in groups.values() if "params" in group]
    return {name for each in lists for name in each} if lists else None


def _place_in_group(key: str, optimizer: str) -> tuple[int, str] | None:
    """The group and the option that a name is about. Torch has another form, too, which names
    parameters in the place of numbers."""
    index, _, option = key.removeprefix(_groups_of(optimizer)).partition(".")
    if not key.startswith(_groups_of(optimizer)) or not index.isdecimal():
        return None
    return int(index), option


def _groups_of(optimizer: str) -> str:
    return f"{optimizer}.param_groups."


def _options_for(
    name: str,
    optimizer: DistributedOptimizer,
    stored: dict[int, dict[str, Any]],
    own_members: Table,
    strict: bool,
) -> dict[int, Options]:
    """The options of each group of an optimizer, from the group that has the same parameters.

    What the checkpoint lacks keeps the value it has here. One that torch wrote does not say which
    parameters a group has: then groups are counted.
    """
    own = optimizer.options()
    if strict and len(stored) != len(own):
        raise CheckpointError(
            f"The checkpoint has {len(stored) or 'no'} parameter groups of an optimizer under the "
            f"name {name}, but the one that is to be loaded has {len(own)}."
        )
    found: dict[int, Options] = {}
    for index, known in enumerate(own):
        members = sorted(own_members[f"{_groups_of(name)}{index}.params"])
        fitting = [
            group
            for place, group in stored.items()
            if (sorted(group["params"]) == members if "params" in group else place == index)
        ]
        if fitting:
            found[index] = {option: fitting[0][option] for option in known if option in fitting[0]}
        elif strict:
            raise CheckpointError(
                f"The checkpoint has no parameter group of the optimizer {name} with just the "
                f"parameters {_listed(members)}. Form the groups as they were saved, and load the "
                "modules after which parameters are named together with the optimizer; or load "
                "with strict=False, which leaves the options of such a group as they are."
            )
    return found


def _check_states(metadata: Metadata, names: ParameterNames) -> None:
    """A parameter that never had a gradient has no state. But if there is state for which there is
    no parameter, too, then the names are others."""
    for name, parameters in names.items():
        leads = _leads({name: parameters})
        keys = [k for k in metadata.state_dict_metadata if k.startswith(f"{name}.state.")]
        found = {key: lead_of(key, leads) for key in keys}
        strangers = sorted(key for key, lead in found.items() if not lead)
        lacking = sorted(leads - set(found.values()))
        if lacking and strangers:
            raise CheckpointError(
                f"The checkpoint has nothing under the names {_listed(lacking)}, but under "
                f"{_listed(strangers)}. Parameters of an optimizer are named after "
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
    objects: Table, optimizers: Collection[str], metadata: Metadata, strict: bool
) -> list[str]:
    """The driver's names, but for the options of optimizers."""
    values = [name for name in objects if not any(_place_in_group(name, o) for o in optimizers)]
    return _present(values, metadata, strict)


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


def _restore(
    contents: Mapping[str, object], values: Table, options: Mapping[str, Mapping[int, Options]]
) -> dict[str, Any]:
    """Bring the driver's own objects to what was saved; returns the plain values."""
    plain: dict[str, Any] = {}
    for name, content in contents.items():
        if isinstance(content, DistributedOptimizer):
            if name in options:
                content.resume(options[name])
        elif name in values:
            restore = getattr(content, "load_state_dict", None)
            if restore is None:
                plain[name] = values[name]
            else:
                with named(name, REFUSES):
                    restore(values[name])
    return plain
