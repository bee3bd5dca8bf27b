"""Call functions on other workers and hold references to what they return."""

from telegrad.rpc import functions
from telegrad.rpc.api import (
    debug_info,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_initialized,
    on_worker_lost,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    wait_for_worker,
)
from telegrad.rpc.errors import (
    CallTimeout,
    CodecError,
    JobClosed,
    LostWithWorker,
    NoRoom,
    NotInitialized,
    ReferenceLost,
    Refused,
    RemoteError,
    RendezvousError,
    TelegradError,
    UnknownWorker,
    Unpackable,
    WorkerLost,
)
from telegrad.rpc.futures import CallFuture
from telegrad.rpc.limits import Limits
from telegrad.rpc.rref import RRef
from telegrad.rpc.worker import WorkerInfo

__all__ = [
    "CallFuture",
    "CallTimeout",
    "CodecError",
    "JobClosed",
    "Limits",
    "LostWithWorker",
    "NoRoom",
    "NotInitialized",
    "RRef",
    "ReferenceLost",
    "Refused",
    "RemoteError",
    "RendezvousError",
    "TelegradError",
    "UnknownWorker",
    "Unpackable",
    "WorkerInfo",
    "WorkerLost",
    "debug_info",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_initialized",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_for_worker",
]
