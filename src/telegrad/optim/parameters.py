"""Where parameters are: whatever names some of them, as references to each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import Tensor, nn

from telegrad.nn.remote_module import RemoteModule
from telegrad.rpc import RRef

Named = tuple[str | None, RRef[Any]]
"""A name, if the parameter has one, and the parameter."""


def references_of(params: Any) -> list[Named]:
    """References to the parameters that a user named, in order.

    Tensors of this worker, RRefs, (name, parameter) pairs, RemoteModules, and modules with
    RemoteModules among their children; one of these, or an iterable of them. The parameters of a
    module in an iterable are named after its place, as in `nn.Sequential`.
    """
    if isinstance(params, Tensor | RRef | nn.Module):
        return list(_expanded(params, None))
    if not isinstance(params, Iterable) or isinstance(params, str | dict):
        raise TypeError(
            f"{type(params).__name__} holds no parameters: give tensors, RRefs, modules or "
            "RemoteModules, (name, parameter) pairs, or dicts with a key 'params'."
        )
    if isinstance(params, Set):
        raise TypeError(
            "A set has no order, by which the parameters and their state are known: give a list."
        )
    found: list[Named] = []
    for place, item in enumerate(params):
        match item:
            case (str(name), parameter):
                found.extend(_expanded(parameter, name))
            case nn.Module():
                found.extend(_expanded(item, str(place)))
            case _:
                found.extend(_expanded(item, None))
    return found


def _expanded(item: Any, name: str | None) -> Iterator[Named]:
    match item:
        case RRef():
            yield name, item
        case Tensor():
            yield name, RRef(item)
        case RemoteModule():
            yield from item.named_parameters(prefix=name or "")
        case nn.Module():
            yield from _of_tree(item, name or "")
        case _:
            raise TypeError(
                f"A {type(item).__name__} is no parameter: give a tensor, an RRef to one, a module "
                "or a RemoteModule."
            )


def _of_tree(root: nn.Module, prefix: str) -> Iterator[Named]:
    """Local and remote parameters of a tree of modules, in the order of `nn.Module.parameters`."""
    seen: set[Tensor] = set()
    for path, module in root.named_modules(prefix=prefix):
        if isinstance(module, RemoteModule):
            yield from module.named_parameters(prefix=path)
            continue
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield name, RRef(parameter)
