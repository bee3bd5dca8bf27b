"""Who has what of a checkpoint, and under which names.

A checkpoint is one flat table from names to tensors and objects. Names do not say on which worker a
value was: `encoder.weight` is the same name wherever the encoder lives, so a checkpoint can be
loaded by a job that spreads its modules otherwise. The state of an optimizer is named after its
parameters, by the names that they have in the modules of the same checkpoint:

    encoder.weight                              of a module called "encoder"
    optimizer.state.encoder.weight.exp_avg      of an optimizer called "optimizer"
    optimizer.param_groups.0.lr
    schedule                                    what has a state_dict, or is a plain value

Each worker makes its own part of the table from what lives there. The driver's part has, besides
its own modules, the options of optimizers and all that is neither module nor optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from telegrad.checkpoint.errors import CheckpointError
from telegrad.nn.hosted import HostedModule
from telegrad.nn.remote_module import RemoteModule, leaving_out_remote_modules
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.owned import OwnedOptimizer
from telegrad.rpc import RRef, get_worker_info

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The modules and optimizers of one worker, by their names in the checkpoint."""

    modules: dict[str, RRef[HostedModule]] = field(default_factory=dict)
    optimizers: dict[str, RRef[OwnedOptimizer]] = field(default_factory=dict)


def divide(contents: Mapping[str, object]) -> dict[str, Part]:
    """The part of each worker that has one; this worker always does."""
    parts: dict[str, Part] = {get_worker_info().name: Part()}
    for name, content in contents.items():
        match content:
            case nn.Module():
                for path, rref in _hosted(name, content):
                    parts.setdefault(rref.owner_name(), Part()).modules[path] = rref
            case DistributedOptimizer():
                for owner, owned in content.parts.items():
                    parts.setdefault(owner, Part()).optimizers[name] = owned
    return parts


def _hosted(name: str, root: nn.Module) -> Iterator[tuple[str, RRef[HostedModule]]]:
    """The local module under its name, and every remote one in it under its path."""
    if not isinstance(root, RemoteModule):
        yield name, RRef(HostedModule(root))
    for path, module in root.named_modules(prefix=name):
        if isinstance(module, RemoteModule):
            yield path, module.rref


def check_contents(contents: Mapping[str, object]) -> None:
    names = list(contents) if isinstance(contents, Mapping) else [None]
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"The contents of a checkpoint are a dict from names to what they name, not "
                f"{contents!r:.100}."
            )


def joined(table: Table, more: Mapping[str, Any]) -> Table:
    """Both tables in one; no value may hide another."""
    for name in more:
        if name in table:
            raise CheckpointError(
                f"Two contents of the checkpoint have something under the name {name}, and only "
                "one of them could be kept: give them names that do not begin alike."
            )
    return {**table, **more}


def driver_objects(contents: Mapping[str, object]) -> Table:
    """What the driver itself has: options, values, and the state of whatever else has one."""
    table: Table = {}
    for name, content in contents.items():
        match content:
            case nn.Module():
                continue
            case DistributedOptimizer():
                for index, options in enumerate(content.options()):
                    named = {f"{name}.param_groups.{index}.{k}": v for k, v in options.items()}
                    table = joined(table, named)
            case _ if hasattr(content, "state_dict"):
                table = joined(table, {name: content.state_dict()})
            case _:
                table = joined(table, {name: content})
    return table


def table_of(part: Part) -> Table:
    """On the worker: names and values of its part."""
    table: Table = {}
    for name, module in _modules(part).items():
        with leaving_out_remote_modules():
            state = module.state_dict()
        table = joined(table, {f"{name}.{key}": value for key, value in state.items()})
    for name, rref in part.optimizers.items():
        optimizer, names = rref.local_value(), optimizer_names(name, part)
        for index, kept in optimizer.state().items():
            table = joined(table, {f"{names[index]}.{key}": v for key, v in kept.items()})
    return table


def _modules(part: Part) -> dict[str, nn.Module]:
    return {name: rref.local_value().module for name, rref in part.modules.items()}


def optimizer_names(name: str, part: Part) -> dict[int, str]:
    """Under what an optimizer's state of each parameter is kept, by the parameter's index."""
    known: dict[Tensor, str] = {}
    for module_name, module in _modules(part).items():
        with leaving_out_remote_modules():
            for path, child in module.named_modules(prefix=module_name):
                if not isinstance(child, RemoteModule):
                    known.update({p: n for n, p in child.named_parameters(path, recurse=False)})
    return {
        member.index: f"{name}.state.{known.get(parameter, member.name)}"
        for member, parameter in part.optimizers[name].local_value().named_parameters()
    }


def apply(part: Part, table: Mapping[str, Any]) -> None:
    """On the worker: take over what was loaded for its part."""
    for name, module in _modules(part).items():
        with leaving_out_remote_modules():
            state = module.state_dict()  # Says in which version it is, which a plain dict does not.
            for key in list(state):
                if f"{name}.{key}" in table:
                    state[key] = table[f"{name}.{key}"]
                else:
                    del state[key]
            module.load_state_dict(state, strict=False)
    for name, rref in part.optimizers.items():
        names = optimizer_names(name, part)
        kept = {index: dict(_state_below(prefix, table)) for index, prefix in names.items()}
        rref.local_value().load_state({index: one for index, one in kept.items() if one}, {})


def _state_below(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        rest = key.removeprefix(f"{prefix}.")
        if rest != key and "." not in rest:
            yield rest, value
