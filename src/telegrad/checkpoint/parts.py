"""Who has what of a checkpoint, and under which names.

A checkpoint is one flat table from names to tensors and objects. Names do not say on which worker a
value was: `encoder.weight` is the same name wherever the encoder lives, so a checkpoint can be
loaded by a job that spreads its modules otherwise. The state of an optimizer is named after its
parameters, by the names that they have in the modules of the same checkpoint:

    encoder.weight                              of a module called "encoder"
    optimizer.state.encoder.weight.exp_avg      of an optimizer called "optimizer"
    optimizer.param_groups.0.lr
    optimizer.param_groups.0.params             the names of the group's parameters
    schedule                                    what has a state_dict, or is a plain value

Each worker makes its own part of the table from what lives there. The driver's part has, besides
its own modules, the options of optimizers and all that is neither module nor optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    """The local module under its name, and every remote one in it under its path, those inside of
    remote ones as well."""
    if not isinstance(root, RemoteModule):
        yield name, RRef(HostedModule(root))
    for path, module in root.named_modules(prefix=name):
        if isinstance(module, RemoteModule):
            yield path, module.rref
            for inside, rref in module.rref.rpc_sync(module.timeout).hosted_inside():
                yield f"{path}.{inside}" if inside else path, rref


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
        with leaving_out_remote_modules(), named(name, "gives no state that could be saved"):
            state = module.state_dict()
        table = joined(table, {f"{name}.{key}": value for key, value in state.items()})
    for name, names in optimizer_names(part).items():
        for index, kept in part.optimizers[name].local_value().state().items():
            lead = state_lead(name, names[index])
            table = joined(table, {f"{lead}{key}": value for key, value in kept.items()})
    return table


@contextmanager
def named(name: str, what: str) -> Iterator[None]:
    """Errors of the user's own code are told with what they are about."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{name} on worker {get_worker_info().name!r} {what}: {type(error).__name__}: {error}"
        ) from error


def _modules(part: Part) -> dict[str, nn.Module]:
    return {name: rref.local_value().module for name, rref in part.modules.items()}


ParameterNames = dict[str, dict[int, str]]
"""By the name of an optimizer, the names of its parameters by their indices."""


def optimizer_names(part: Part) -> ParameterNames:
    """How the parameters of a worker's optimizers are called in the checkpoint."""
    known: dict[Tensor, str] = {}
    for module_name, module in _modules(part).items():
        with leaving_out_remote_modules():
            for path, child in module.named_modules(prefix=module_name):
                if not isinstance(child, RemoteModule):
                    known.update({p: n for n, p in child.named_parameters(path, recurse=False)})
    return {
        name: {
            member.index: known.get(parameter, member.name)
            for member, parameter in rref.local_value().named_parameters()
        }
        for name, rref in part.optimizers.items()
    }


def state_lead(optimizer: str, parameter: str) -> str:
    """What the names of an optimizer's state of a parameter begin with."""
    return f"{optimizer}.state.{parameter}."


def members_of_groups(contents: Mapping[str, object], names: ParameterNames) -> Table:
    """The names of the parameters in each group of each optimizer, by the name of the list."""
    return {
        f"{name}.param_groups.{index}.params": [names[name][m] for m in members if m in names[name]]
        for name, content in contents.items()
        if isinstance(content, DistributedOptimizer)
        for index, members in enumerate(content.members())
    }


def merged(answers: Iterable[ParameterNames]) -> ParameterNames:
    """The names of all workers in one."""
    names: ParameterNames = {}
    for answer in answers:
        for optimizer, parameters in answer.items():
            names.setdefault(optimizer, {}).update(parameters)
    return names


def apply(
    part: Part, table: Mapping[str, Any], known: Mapping[str, Collection[str] | None]
) -> None:
    """On the worker: take over what was loaded for its part.

    Of the optimizers only those that are `known` to the checkpoint, with the parameters that they
    had there, or None if it does not say. What it has for these, which may be nothing, is all that
    they keep; what it does not know of keeps its state.
    """
    for name, module in _modules(part).items():
        with leaving_out_remote_modules(), named(name, REFUSES):
            state = module.state_dict()  # Says in which version it is, which a plain dict does not.
            for key in list(state):
                if f"{name}.{key}" in table:
                    state[key] = table[f"{name}.{key}"]
                else:
                    del state[key]
            module.load_state_dict(state, strict=False)
    for name, names in optimizer_names(part).items():
        if name in known:
            leads = {state_lead(name, parameter): index for index, parameter in names.items()}
            parameters, optimizer = known[name], part.optimizers[name].local_value()
            state_of: dict[int, dict[str, Any]] = {}
            for key, value in table.items():
                if lead := lead_of(key, leads):
                    state_of.setdefault(leads[lead], {})[key.removeprefix(lead)] = value
            for index, kept in optimizer.state().items():
                if parameters is None or names[index] not in parameters:
                    state_of.setdefault(index, kept)
            with named(name, REFUSES):
                optimizer.load_state(state_of, {})


REFUSES = "does not take what was saved, and the job may now be loaded in part"


def lead_of(key: str, leads: Collection[str]) -> str:
    """The longest of the leads with which a name begins; keys of state may have dots, too."""
    rest = key
    while rest:
        rest = rest[: rest.rfind(".", 0, len(rest) - 1) + 1]
        if rest in leads:
            return rest
    return ""
