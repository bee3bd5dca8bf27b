"""How a process joins a job: `init_rpc` as torch has it."""

from __future__ import annotations

import numbers
import os
import threading
from datetime import timedelta
from typing import Any

from telegrad.compat.rpc import api, backend_registry
from telegrad.compat.stock import PrefixStore, RpcBackendOptions, Store, open_store, rendezvous

_init_counter = 0
_init_counter_lock = threading.Lock()
# A store may be served by what its rendezvous made: that has to stay alive.
rendezvous_iterator: Any = None


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
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    _require_place(rpc_backend_options.init_method, rank, world_size)
    store, rank = _meeting_place(rpc_backend_options, rank, world_size)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_for(given: RpcBackendOptions | None) -> Any:
    if given is None:
        return backend_registry.BackendType.TENSORPIPE
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _require_place(init_method: str, rank: int, world_size: int | None) -> None:
    """Torch's rendezvous asks for a rank where it finds none, and finds that of the environment.
    A job is not joined under it, nor with that WORLD_SIZE: rather than open one that nobody meant,
    stock fails."""
    from_environment = init_method.startswith("env:") and "RANK" in os.environ
    if not world_size and isinstance(rank, numbers.Integral) and rank < 0 and from_environment:
        raise RuntimeError(
            "worker_id needs to be in the range [0, 65535]: init_rpc was given neither a rank nor "
            "a world_size. Give both, as rank=int(os.environ['RANK']) and "
            "world_size=int(os.environ['WORLD_SIZE']), or a rank alone to open a job that workers "
            "join and leave as they like."
        )


def _meeting_place(
    given: RpcBackendOptions, rank: int, world_size: int | None
) -> tuple[Store, int]:
    """The store where the workers meet, under a prefix of its own for each time they do."""
    global _init_counter, rendezvous_iterator
    if world_size:
        rendezvous_iterator = rendezvous(given.init_method, rank=rank, world_size=world_size)
        store, found_rank, _ = next(rendezvous_iterator)
        rank = found_rank if rank < 0 else rank
    else:
        store = open_store(given, rank)
    if given.rpc_timeout > 0:
        store.set_timeout(timedelta(seconds=given.rpc_timeout))
    with _init_counter_lock:
        prefix = f"rpc_prefix_{_init_counter}"
        _init_counter += 1
    return PrefixStore(prefix, store), rank


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    wanted: list[tuple[Any, Any]] = [
        (backend, backend_registry.BackendType),
        (store, Store),
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
    backend: Any = backend_registry.BackendType.TENSORPIPE,
    store: Store | None = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    api._gatherings.clear()
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)
