"""Stands for `torch.distributed.rpc`."""

from __future__ import annotations

import numbers
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from telegrad.compat.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
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
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.compat.rpc.rref import PyRRef
from telegrad.compat.stock import RpcBackendOptions, _TensorPipeRpcBackendOptionsBase
from telegrad.rpc.node import current_node
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

BackendType = backend_registry.BackendType
_is_tensorpipe_available = True
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT

_init_counter = 0
_init_counter_lock = threading.Lock()
# A store may be served by what its rendezvous made: that has to stay alive.
rendezvous_iterator: Any = None


def is_available() -> bool:
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join a job under a name that no other worker has."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_for(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    store, rank = _meeting_place(rpc_backend_options, rank, world_size)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_for(given: RpcBackendOptions | None) -> Any:
    if given is None:
        return backend_registry.BackendType.TENSORPIPE
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _meeting_place(
    given: RpcBackendOptions, rank: int, world_size: int | None
) -> tuple[dist.Store, int]:
    """The store where the workers meet, under a prefix of its own for each time they do."""
    global _init_counter, rendezvous_iterator
    if world_size:
        rendezvous_iterator = dist.rendezvous(given.init_method, rank=rank, world_size=world_size)
        store, found_rank, _ = next(rendezvous_iterator)
        rank = found_rank if rank < 0 else rank
    else:
        store = dist._create_store_from_options(given, rank)
    store.set_timeout(timedelta(seconds=given.rpc_timeout))
    with _init_counter_lock:
        prefix = f"rpc_prefix_{_init_counter}"
        _init_counter += 1
    return dist.PrefixStore(prefix, store), rank


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    wanted: list[tuple[Any, Any]] = [
        (backend, backend_registry.BackendType),
        (store, dist.Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for argument, kind in wanted:
        if not isinstance(argument, kind):
            raise RuntimeError(
                f"Argument {argument} must be of type {kind} but got type {type(argument)}"
            )


def _init_rpc_backend(
    backend: Any = BackendType.TENSORPIPE,
    store: dist.Store | None = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    api._gatherings.clear()
    agent = init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


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
    raise AttributeError(
        f"module 'torch.distributed.rpc' has no attribute {name!r} on telegrad. If code needs it, "
        "please say so: https://github.com/telegrad/telegrad/issues"
    )
