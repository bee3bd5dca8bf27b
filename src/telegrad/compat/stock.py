"""Stock torch as it is before anything is replaced: the one file that names its private parts.

Import this before `install` swaps modules; from then on these names still lead to the originals.
What is taken over as it is: plain data (options, enums, namedtuples, constants) and the RPC
pickler, whose table of tensors has a form that user code relies on.
"""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd as autograd
import torch.distributed.nn.api.remote_module as remote_module
import torch.distributed.optim.optimizer as optimizer
import torch.distributed.rpc as rpc
from torch._C import _distributed_autograd as c_autograd
from torch._C import _distributed_rpc as c_rpc
from torch._C._distributed_rpc import (
    RemoteProfilerManager,
    RpcBackendOptions,
    _set_profiler_node_id,
    _TensorPipeRpcBackendOptionsBase,
)
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    _create_store_from_options,
    rendezvous,
)
from torch.distributed.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
    server_process_global_profiler,
)
from torch.distributed.rpc.backend_registry import BackendValue
from torch.distributed.rpc.internal import (
    PythonUDF,
    RemoteException,
    RPCExecMode,
    _build_rpc_profiling_key,
    _handle_exception,
    _start_record_function,
)
from torch.distributed.rpc.options import TensorPipeRpcBackendOptions

MODULES: dict[str, ModuleType] = {
    "torch.distributed.rpc": rpc,
    "torch.distributed.rpc.api": api,
    "torch.distributed.rpc.backend_registry": backend_registry,
    "torch.distributed.rpc.constants": constants,
    "torch.distributed.rpc.functions": functions,
    "torch.distributed.rpc.internal": internal,
    "torch.distributed.rpc.options": options,
    "torch.distributed.rpc.rref_proxy": rref_proxy,
    "torch.distributed.autograd": autograd,
}
"""Those that `install` replaces, by name."""

RecursiveScriptModule: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
RpcPickler: Any = internal._InternalRPCPickler


def script_function_name(function: torch.jit.ScriptFunction[Any, Any]) -> str:
    """The name under which torch keeps a compiled function."""
    return str(torch._jit_internal._qualified_name(function))


def script_function(name: str) -> torch.jit.ScriptFunction[Any, Any]:
    """The compiled function of that name in this process."""
    found: torch.jit.ScriptFunction[Any, Any] | None = torch.jit._state._python_cu.find_function(
        name
    )
    if found is None:
        raise AttributeError(f"no TorchScript function {name} has been compiled on this worker")
    return found


def is_operator(function: object) -> bool:
    """Whether a function is one of torch's operators."""
    return torch.jit._builtins._find_builtin(function) is not None  # type: ignore[no-untyped-call]


def is_list_of_operator(function: object) -> bool:
    """Whether a function is an operator whose several tensors are one result of it, a list."""
    name = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if name is None:
        return False
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return all(len(schema.returns) == 1 for schema in schemas)


def load_script_module(data: io.BytesIO) -> Any:
    return torch.jit.load(data)  # type: ignore[no-untyped-call]


def open_store(options: RpcBackendOptions, rank: int) -> Store:
    """The store of a job without a world size."""
    store: Store = _create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
    return store


def is_cpu_only(maps: dict[str, dict[torch.device, torch.device]]) -> bool:
    """Whether device maps ask for nothing but what happens without them."""
    devices = [device for map_ in maps.values() for pair in map_.items() for device in pair]
    return all(device.type == "cpu" for device in devices)


__all__ = [
    "MODULES",
    "BackendValue",
    "PrefixStore",
    "PythonUDF",
    "RPCExecMode",
    "RecursiveScriptModule",
    "RemoteException",
    "RemoteProfilerManager",
    "RpcBackendOptions",
    "RpcPickler",
    "Store",
    "TensorPipeRpcBackendOptions",
    "_TensorPipeRpcBackendOptionsBase",
    "_build_rpc_profiling_key",
    "_handle_exception",
    "_set_profiler_node_id",
    "_start_record_function",
    "c_autograd",
    "c_rpc",
    "constants",
    "internal",
    "is_cpu_only",
    "is_list_of_operator",
    "is_operator",
    "load_script_module",
    "open_store",
    "optimizer",
    "options",
    "remote_module",
    "rendezvous",
    "script_function",
    "script_function_name",
    "server_process_global_profiler",
]
