"""Ray's actors and gRPC behind the two calls that a measurement makes: `rpc_sync`, `rpc_async`.

Each is used as its own documentation would have it, and given the best of its ways: the actor has a
method per function, so that no function is sent; gRPC goes over a Unix socket and carries the raw
bytes of a float tensor, with no description of what they are. Both do a little less than a remote
call of any function with any arguments, which is what they are compared with.

Importing this needs neither; using it needs what requirements-bench.txt lists.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

OBJECT_STORE_BYTES = 1 << 30
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Actor:
    """The remote side for Ray. Its methods are the functions that `benchmarks.rpc` calls."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def nothing(self) -> None:
        return None

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def cpu_seconds(self) -> float:
        return time.process_time()


class RayFuture:
    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def wait(self) -> Any:
        import ray

        return ray.get(self._reference)


class RayCalls:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def rpc_async(self, to: str, function: Callable[..., Any], args: Any = ()) -> RayFuture:
        return RayFuture(getattr(self._actor, function.__name__).remote(*args))

    def rpc_sync(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        return self.rpc_async(to, function, args).wait()


@contextmanager
def ray_actor() -> Iterator[RayCalls]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    torch.set_num_threads(1)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        object_store_memory=OBJECT_STORE_BYTES,
    )
    try:
        yield RayCalls(ray.remote(Actor).remote())
    finally:
        ray.shutdown()


def _nothing(request: bytes, context: Any) -> bytes:
    return b""


def _echo(request: bytes, context: Any) -> bytes:
    return _to_bytes(_to_tensor(request))


def _cpu_seconds(request: bytes, context: Any) -> bytes:
    return repr(time.process_time()).encode()


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


READERS: dict[str, Callable[[bytes], Any]] = {
    "nothing": lambda data: None,
    "echo": _to_tensor,
    "cpu_seconds": float,
}


class GrpcFuture:
    def __init__(self, future: Any, read: Callable[[bytes], Any]) -> None:
        self._future = future
        self._read = read

    def wait(self) -> Any:
        return self._read(self._future.result())


class GrpcCalls:
    def __init__(self, channel: Any) -> None:
        self._stubs = {name: channel.unary_unary(f"/benchmark/{name}") for name in READERS}

    def rpc_async(self, to: str, function: Callable[..., Any], args: Any = ()) -> GrpcFuture:
        name = function.__name__
        return GrpcFuture(self._stubs[name].future(_request(args)), READERS[name])

    def rpc_sync(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        name = function.__name__
        return READERS[name](self._stubs[name](_request(args)))


def _request(args: tuple[torch.Tensor, ...]) -> bytes:
    return _to_bytes(args[0]) if args else b""


def _serve_grpc(address: str, ready: Connection) -> None:
    import grpc

    torch.set_num_threads(1)
    functions = {"nothing": _nothing, "echo": _echo, "cpu_seconds": _cpu_seconds}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(function) for name, function in functions.items()
    }
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", handlers),))
    server.add_insecure_port(address)
    server.start()
    ready.send(True)
    server.wait_for_termination()


@contextmanager
def grpc_server() -> Iterator[GrpcCalls]:
    import grpc

    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{Path(directory) / 'server.sock'}"
        server = spawn.Process(target=_serve_grpc, args=(address, there), daemon=True)
        server.start()
        try:
            here.recv()
            with grpc.insecure_channel(address, options=GRPC_OPTIONS) as channel:
                yield GrpcCalls(channel)
        finally:
            server.terminate()
            server.join()
