"""How stock modules give way, and come back.

Replacing an entry of `sys.modules` does not reach the names that other modules bound when they were
imported: torch's optimizer, RemoteModule, DistributedDataParallel, TorchScript and any user module
that ran `from torch.distributed.rpc import RRef`. So every loaded module is searched for stock
modules and their public objects, by identity, and each such name is bound to what stands for it.
Each change is remembered; `uninstall` makes them in reverse.

What must never happen: that a name leads to stock while another leads to telegrad. Two workers, or
two modules of one, would then each have an RPC of their own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.futures
from torch.nn.parallel import DistributedDataParallel

from telegrad.autograd import nodes
from telegrad.rpc.current import find_node

_lock = threading.RLock()
_undo: list[Callable[[], None]] = []
_ABSENT = object()


def is_installed() -> bool:
    """Whether torch's distributed modules are telegrad's in this process."""
    return bool(_undo)


def install() -> None:
    """Make `torch.distributed.rpc` and what belongs to it be telegrad, in this process."""
    with _lock:
        if is_installed():
            return
        from telegrad.compat import autograd, futures, optim, reducers, rpc, stock
        from telegrad.compat.rpc import internal

        if stock.c_rpc._is_current_rpc_agent_set():
            raise RuntimeError(
                "torch RPC runs in this process already: call telegrad.compat.install() before "
                "torch.distributed.rpc.init_rpc()."
            )
        internal.take_over_reducers()
        modules = _replacements(rpc, autograd)
        substitutes = _substitutes(modules)
        _rebind(substitutes)
        for name, module in modules.items():
            parent, _, leaf = name.rpartition(".")
            _set(sys.modules, name, module)
            _set(vars(sys.modules[parent]), leaf, module)
        _forget_later("torch.distributed.rpc.")
        _replace_names(stock.c_rpc, rpc, rpc.api)
        _replace_names(stock.c_autograd, autograd)
        _set(vars(torch.futures), "wait_all", futures.wait_all)
        _undo.append(lambda: nodes.set_names(*nodes.OWN_NAMES))
        nodes.set_names(
            "torch::distributed::autograd::SendRpcBackward",
            "torch::distributed::autograd::RecvRpcBackward",
        )
        make_reducer = reducers.outliving(DistributedDataParallel._ddp_init_helper)
        _set_attribute(DistributedDataParallel, "_ddp_init_helper", make_reducer)
        for name in ("_new_script_local_optimizer", "_script_local_optimizer_step"):
            _set(vars(stock.optimizer), name, getattr(optim, name))


def uninstall() -> None:
    """Bring stock back."""
    with _lock:
        if is_installed() and find_node() is not None:
            raise RuntimeError(
                "Telegrad's RPC runs in this process: call torch.distributed.rpc.shutdown() "
                "before telegrad.compat.uninstall()."
            )
        while _undo:
            _undo.pop()()


def _replacements(rpc: ModuleType, autograd: ModuleType) -> dict[str, ModuleType]:
    from telegrad.compat import stock

    found: dict[str, ModuleType] = {}
    for name in stock.MODULES:
        _, _, inside = name.partition("torch.distributed.rpc.")
        if name == "torch.distributed.autograd":
            found[name] = autograd
        else:
            found[name] = getattr(rpc, inside) if inside else rpc
    return found


def _substitutes(modules: dict[str, ModuleType]) -> dict[int, Any]:
    """What stands for each stock module, class and function, by the identity of the latter."""
    from telegrad.compat import stock

    found: dict[int, Any] = {}
    for name, substitute in modules.items():
        original = stock.MODULES[name]
        found[id(original)] = substitute
        for attribute, value in vars(original).items():
            ours = vars(substitute).get(attribute, _ABSENT)
            if ours is not _ABSENT and ours is not value and _is_own(value):
                found[id(value)] = ours
    return found


def _is_own(value: Any) -> bool:
    """Whether an object belongs to RPC: small constants and typing names are everybody's."""
    module = getattr(value, "__module__", None) or ""
    return (isinstance(value, type) or callable(value)) and (
        module.startswith(("torch.distributed.rpc", "torch.distributed.autograd"))
        or module.startswith(("torch._C._distributed_rpc", "torch._C._distributed_autograd"))
    )


def _rebind(substitutes: dict[int, Any]) -> None:
    from telegrad.compat import stock

    left_alone = {id(module) for module in stock.MODULES.values()}
    left_alone |= {id(stock), id(stock.c_rpc), id(stock.c_autograd)}
    for name, module in list(sys.modules.items()):
        if id(module) in left_alone or name.startswith("telegrad.") or not _is_module(module):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in substitutes:
                _set(vars(module), attribute, substitutes[id(value)])


def _is_module(value: object) -> bool:
    return isinstance(value, ModuleType)


def _replace_names(target: ModuleType, *sources: ModuleType) -> None:
    """Names of a C module that ours know too."""
    for attribute in list(vars(target)):
        if attribute.startswith("__"):
            continue
        for source in sources:
            ours = vars(source).get(attribute, _ABSENT)
            if ours is not _ABSENT:
                _set(vars(target), attribute, ours)
                break


def _forget_later(package: str) -> None:
    """What will be imported from a stock package comes from ours: it must not outlive us there."""
    known = set(sys.modules)

    def forget() -> None:
        for name in set(sys.modules) - known:
            if name.startswith(package):
                del sys.modules[name]

    _undo.append(forget)


def _set(namespace: Any, name: str, value: Any) -> None:
    old = namespace.get(name, _ABSENT)

    def restore() -> None:
        if old is _ABSENT:
            namespace.pop(name, None)
        else:
            namespace[name] = old

    _undo.append(restore)
    namespace[name] = value


def _set_attribute(cls: type, name: str, value: object) -> None:
    old = getattr(cls, name)
    _undo.append(lambda: setattr(cls, name, old))
    setattr(cls, name, value)
