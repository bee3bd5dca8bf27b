"""What gives way when telegrad takes the place of torch's RPC, and that it comes back."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.nn.api.remote_module
import torch.distributed.optim.optimizer
import torch.distributed.rpc
import torch.nn.parallel.distributed

from telegrad import compat
from telegrad.autograd import nodes
from telegrad.compat import stock

OTHER_NAMES = [
    ("torch.distributed.optim.optimizer", "rpc"),
    ("torch.distributed.optim.optimizer", "dist_autograd"),
    ("torch.distributed.optim.optimizer", "RRef"),
    ("torch.distributed.optim.optimizer", "_new_script_local_optimizer"),
    ("torch.distributed.optim.optimizer", "_script_local_optimizer_step"),
    ("torch.distributed.nn.api.remote_module", "rpc"),
    ("torch.nn.parallel.distributed", "RRef"),
    ("torch._jit_internal", "RRef"),
    ("torch._jit_internal", "PyRRef"),
    ("torch.jit.annotations", "RRef"),
    ("torch._C._distributed_rpc", "PyRRef"),
    ("torch._C._distributed_rpc", "_is_current_rpc_agent_set"),
    ("torch._C._distributed_autograd", "_new_context"),
    ("torch.futures", "wait_all"),
]


def everything() -> dict[str, Any]:
    """Every name that an installation may change, with what it stands for now."""
    found: dict[str, Any] = {name: sys.modules[name] for name in stock.MODULES}
    for name in stock.MODULES:
        parent, _, leaf = name.rpartition(".")
        found[f"{name} (of its parent)"] = getattr(sys.modules[parent], leaf)
    for module, name in OTHER_NAMES:
        found[f"{module}.{name}"] = getattr(sys.modules[module], name)
    return found


def test_every_name_that_code_can_reach_leads_to_telegrad() -> None:
    before = everything()
    compat.install()
    try:
        during = everything()
    finally:
        compat.uninstall()
    assert [name for name in before if during[name] is before[name]] == []


def test_uninstalling_brings_every_name_back() -> None:
    before = everything()
    compat.install()
    compat.uninstall()
    assert everything() == before
    assert not compat.is_installed()


def test_installing_twice_is_installing_once() -> None:
    before = everything()
    compat.install()
    compat.install()
    compat.uninstall()
    assert everything() == before


def test_names_that_a_module_took_before_are_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    early = ModuleType("an_early_module")
    early.rpc_sync = torch.distributed.rpc.rpc_sync  # type: ignore[attr-defined]
    early.number = 60.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_early_module", early)
    taken = early.rpc_sync
    compat.install()
    try:
        assert early.rpc_sync is torch.distributed.rpc.rpc_sync
        assert early.rpc_sync is not taken
        assert early.number == 60.0
    finally:
        compat.uninstall()
    assert early.rpc_sync is taken


def test_uninstalling_is_refused_while_a_job_runs(alone: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="shutdown"):
        compat.uninstall()
    assert compat.is_installed()


IMPORTS = (
    "import torch.distributed.rpc.server_process_global_profiler as profiler",
    "from torch.distributed.rpc import _server_process_global_profile",
    "from torch.distributed.rpc import RemoteProfilerManager, _set_profiler_node_id, Store",
    "from torch.distributed.rpc.internal import _handle_exception",
    "from torch.distributed.rpc.rref_proxy import RRefProxy",
)


def test_names_that_code_imports_are_found_in_a_process_that_imported_nothing_before() -> None:
    lines = ["import telegrad.compat", "telegrad.compat.install()", *IMPORTS]
    lines.append("assert RRefProxy.__module__.startswith('telegrad.')")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_autograd_nodes_bear_the_names_of_torch_only_while_installed() -> None:
    arrived = torch.ones(1)
    (recv,) = nodes.receive(1, 0, (0,), [arrived])
    _, send, _ = nodes.send(lambda: 2, 0, [arrived])
    compat.install()
    assert recv.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert send.name() == "torch::distributed::autograd::SendRpcBackward"
    compat.uninstall()
    assert (send.name(), recv.name()) == nodes.OWN_NAMES


def test_submodules_that_were_imported_meanwhile_are_stock_again() -> None:
    compat.install()
    try:
        ours = importlib.import_module("torch.distributed.rpc._testing")
        assert ours.__spec__ is not None
        assert "telegrad" in str(ours.__spec__.origin)
        assert "FAULTY_TENSORPIPE" in torch.distributed.rpc.backend_registry.BackendType.__members__
    finally:
        compat.uninstall()
    assert "torch.distributed.rpc._testing" not in sys.modules
