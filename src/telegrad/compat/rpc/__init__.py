"""Stands for `torch.distributed.rpc`: the names that code takes from there, private ones too."""

# ruff: noqa: F401

from __future__ import annotations

from typing import Any

from telegrad.compat.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
)
from telegrad.compat.rpc.agent import RpcAgent, TensorPipeAgent
from telegrad.compat.rpc.api import (
    AllGatherStates,
    RRef,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.compat.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from telegrad.compat.rpc.joining import _init_rpc_backend, _validate_rpc_args, init_rpc
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.compat.rpc.rref import PyRRef
from telegrad.compat.stock import (
    RemoteProfilerManager,
    RpcBackendOptions,
    Store,
    _set_profiler_node_id,
    _TensorPipeRpcBackendOptionsBase,
    server_process_global_profiler,
)
from telegrad.rpc.current import current_node
from telegrad.rpc.worker import WorkerInfo

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_is_tensorpipe_available = True
_server_process_global_profile = server_process_global_profiler._server_process_global_profile
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT


def is_available() -> bool:
    return True


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of references in the words of torch."""
    info = current_node().values.debug_info()
    return {
        "num_owner_rrefs": str(info["shared"]),
        "num_pending_users": str(info["unconfirmed"]),
        "num_pending_futures": str(info["pins"]),
        "num_forks": str(info["forks"]),
    }


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    from telegrad.compat import autograd

    info = _rref_context_get_debug_info()
    info.update(_get_current_rpc_agent().get_debug_info())
    info.update(autograd._get_debug_info())
    return info


def enable_gil_profiling(flag: bool) -> None:
    if flag:
        raise RuntimeError(
            "telegrad does not measure how long its threads wait for the interpreter lock"
        )


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'torch.distributed.rpc' has no attribute {name!r} on telegrad")
