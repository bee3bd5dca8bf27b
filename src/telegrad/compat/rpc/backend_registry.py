"""Stands for `torch.distributed.rpc.backend_registry`.

`BackendType` is an enum that is made anew whenever a backend is registered, as in stock: members
are found by name, and code that holds an old one still works.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from telegrad.compat.rpc import constants
from telegrad.compat.stock import (
    BackendValue,
    RpcBackendOptions,
    Store,
    TensorPipeRpcBackendOptions,
)

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class _Named(enum.Enum):
    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _make_enum(values: dict[str, BackendValue]) -> Any:
    functional: Any = _Named
    return functional("BackendType", values)


BackendType: Any = _make_enum({})


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend: how its options are made, and how it starts an agent."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    values = {member.name: member.value for member in BackendType}
    values[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum(values)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    handler = backend.value.construct_rpc_backend_options_handler
    return handler(rpc_timeout, init_method, **kwargs)  # type: ignore[no-any-return]


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _start_telegrad(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> Any:
    from telegrad.compat.rpc.agent import start

    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    return start(store, name, rank, world_size, rpc_backend_options)


# Code asks for the backend of this name, and gets telegrad.
register_backend("TENSORPIPE", _tensorpipe_options, _start_telegrad)
