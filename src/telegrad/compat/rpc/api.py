"""Stands for `torch.distributed.rpc.api`.

Code replaces functions of this module (`_wait_all_workers`, `_broadcast_to_followers`, ...), so
they find each other by their names here, when they are called.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from telegrad.compat.rpc.agent import TensorPipeAgent, current_agent
from telegrad.compat.rpc.calls import Udf, ValueUdf
from telegrad.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.compat.rpc.gather import AllGatherStates, Gatherings
from telegrad.compat.rpc.internal import _internal_rpc_pickler
from telegrad.compat.rpc.rref import PyRRef as PyRRef
from telegrad.compat.rpc.rref import RRef, _type_on_owner, make_remote, seconds
from telegrad.compat.stock import PythonUDF
from telegrad.rpc import api as native
from telegrad.rpc.current import current_node, find_node
from telegrad.rpc.errors import NotInitialized
from telegrad.rpc.worker import WorkerInfo

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
To = str | int | WorkerInfo
Args = tuple[Any, ...] | list[Any] | None
Kwargs = dict[str, Any] | None

logger = logging.getLogger("torch.distributed.rpc.api")

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_gatherings = Gatherings()
_ALL_WORKER_NAMES: set[str] = set()


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if find_node() is None:
            raise NotInitialized()
        return func(*args, **kwargs)

    return wrapper


def _is_current_rpc_agent_set() -> bool:
    return find_node() is not None


def _get_current_rpc_agent() -> TensorPipeAgent:
    return current_agent()


def get_rpc_timeout() -> float:
    return current_node().timeout


def _set_rpc_timeout(timeout: float) -> None:
    current_node().timeout = timeout


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Let another pickler make the bytes of the calls in this block."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# Calls.


def _run_pickled(data: bytes, table: list[Any]) -> Any:
    """On the callee: a call that the caller's own pickler made."""
    call = _default_pickler.deserialize(data, table)
    if isinstance(call, BaseException):
        raise call
    return call.func(*call.args, **call.kwargs)


def _prepare(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, kind: type[Udf] = Udf
) -> tuple[Udf, Any, Kwargs]:
    if not callable(func):
        raise TypeError("function should be callable.")
    if _default_pickler is not _internal_rpc_pickler:
        pickled = _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {}))
        return kind(_run_pickled), pickled, None
    wrapped = getattr(func, "_wrapped_async_rpc_function", None)
    if isinstance(wrapped, torch.jit.ScriptFunction):
        raise RuntimeError(
            f"{func!r} is compiled by TorchScript and marked with async_execution: telegrad runs "
            "async functions of Python only. Leave out @torch.jit.script."
        )
    return kind(func), args or (), kwargs


@_require_initialized
def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function on another worker and wait for its result."""
    return native.rpc_sync(to, *_prepare(func, args, kwargs), seconds(timeout))


@_require_initialized
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Call a function on another worker; its result comes as a future."""
    future = native.rpc_async(to, *_prepare(func, args, kwargs), seconds(timeout))
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@_require_initialized
def remote(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call a function on another worker and give a reference to its result at once."""
    node = current_node()
    call = _prepare(func, args, kwargs, ValueUdf)
    return make_remote(node, node.members.find(to), *call, timeout)


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    return native.get_worker_info(worker_name)


def _to_worker_info(to: To) -> WorkerInfo:
    return current_node().members.find(to)


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(
    rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:
    future = rpc_async(rref.owner(), _type_on_owner, (rref,), timeout=timeout)
    return future.wait() if blocking else future


@contextmanager
def _wait_all() -> Iterator[None]:
    """Wait for all futures that `rpc_async` gives in this block when it ends."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# Gathering.


def _init_rpc_states(agent: TensorPipeAgent) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    native.on_worker_lost(lambda worker, reason: _gatherings.lose(worker.name, reason))


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: object, worker_names: set[str] | None = None
) -> None:
    _gatherings.add(sequence_id, worker_name, obj, worker_names or _ALL_WORKER_NAMES)


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    _gatherings.finish(sequence_id, objects_map)


def _fail_gathering(sequence_id: str, problem: str) -> None:
    _gatherings.fail(sequence_id, problem)


def _limits(timeout: float) -> tuple[float, float | None]:
    """How long a call of a gathering may take, and how long a worker waits for the others."""
    if timeout == UNSET_RPC_TIMEOUT:
        return get_rpc_timeout(), None
    return timeout, None if timeout == DEFAULT_SHUTDOWN_TIMEOUT else timeout


@_require_initialized
def _all_gather(
    obj: object, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Give an object to all workers of a group, and get theirs."""
    names = worker_names or _ALL_WORKER_NAMES
    leader = min(names)
    me = current_node().info.name
    gathering = _gatherings.begin(names)
    call_timeout, patience = _limits(timeout)
    if me == leader:
        _gather_to_leader(gathering, me, obj, names)
    else:
        rpc_sync(leader, _gather_to_leader, (gathering, me, obj, names), timeout=call_timeout)
    if me == leader:
        _lead(gathering, names, patience, call_timeout)
    else:
        _gatherings.wait(gathering, {leader}, patience)
    return _gatherings.end(gathering)


def _lead(gathering: str, names: set[str], patience: float | None, call_timeout: float) -> None:
    followers = names - {current_node().info.name}
    try:
        objects = _gatherings.wait(gathering, names, patience)
    except RuntimeError as error:
        for name in followers:
            rpc_async(name, _fail_gathering, (gathering, str(error)))
        raise
    _broadcast(gathering, followers, objects, call_timeout)


def _broadcast(
    gathering: str, followers: set[str], objects: dict[str, Any], timeout: float
) -> None:
    call = (gathering, objects)
    futures = {
        name: rpc_async(name, _broadcast_to_followers, call, timeout=timeout) for name in followers
    }
    errors = []
    for name, future in futures.items():
        try:
            future.wait()
        except Exception as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after "
            f"{timeout:.2f} seconds. The first exception is {errors[0][1]}"
        )


@_require_initialized
def _barrier(worker_names: set[str] | list[str]) -> None:
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# The end.


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Let go of every reference that this worker holds on values of others."""
    values = current_node().values
    values.bury()
    values.release_all()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the job; if gracefully, when all have called this and nothing is under way."""
    if not graceful:
        native.shutdown(graceful=False)
        return
    try:
        leaks = _close(timeout)
    except BaseException:
        native.shutdown(graceful=False)
        raise
    native.shutdown(graceful=False)
    if leaks:
        raise RuntimeError(leaks)


def _close(timeout: float) -> str | None:
    """Let go of what we hold and wait for the others. What is held in spite of that, in words."""
    agent = _get_current_rpc_agent()
    if agent.is_static_group:
        _wait_all_workers(timeout)
    else:
        agent.sync()
    _delete_all_user_and_unforked_owner_rrefs()
    leaks = None if _ignore_rref_leak else _describe_leaks()
    if agent.is_static_group:
        agent.join(timeout=timeout)
        _delete_all_user_and_unforked_owner_rrefs()
    return leaks


def _describe_leaks() -> str | None:
    node = current_node()
    held = node.values.holds()
    if not held:
        return None
    return (
        f"Leaking RRef: worker {node.info.name!r} still holds {held} references to values of "
        "others at shutdown. Drop them before, or leave "
        "torch.distributed.rpc.api._ignore_rref_leak at True."
    )
