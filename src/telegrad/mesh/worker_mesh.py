"""A device mesh whose members are telegrad workers.

Inside of the functions that they run, the workers of a mesh use collectives, DTensor and DDP as in
any SPMD program: torch's process groups connect them (gloo on CPUs, NCCL on GPUs). From outside,
one worker calls all of them at once with `WorkerMesh.run`. The calls are ordinary remote calls, so
gradients flow back through them.

A tensor that every worker of a mesh is given is *replicated*. DTensor gives each copy the whole
gradient, so if all of them were sent back their sum would be too large by the number of workers.
`replicate` lets exactly one copy carry it; `gathered` is its counterpart for results.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from telegrad.mesh.torch_private import begin_world
from telegrad.rpc.api import get_worker_info, get_worker_infos, rpc_async, rpc_sync
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.outside import outside_of_graphs

_mesh: DeviceMesh | None = None


class WorkerMesh:
    """Workers arranged in a grid. Made by `init_mesh`."""

    def __init__(
        self, workers: tuple[str, ...], shape: tuple[int, ...], names: tuple[str, ...]
    ) -> None:
        self.workers = workers
        self.shape = shape
        self.names = names

    @outside_of_graphs
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(mesh, *args, **kwargs)` on all workers at once; the results by rank.

        If it fails on one worker, the others may wait in a collective for it: their error comes
        when the process group's timeout does.
        """
        futures = [
            rpc_async(worker, _run, (function, args, kwargs), timeout=0) for worker in self.workers
        ]
        return [future.wait() for future in futures]

    @outside_of_graphs
    def close(self) -> None:
        """Take the process groups down. The workers can then form another mesh."""
        for future in [rpc_async(worker, _leave) for worker in self.workers]:
            future.wait()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))
        return f"WorkerMesh({sizes}, workers={list(self.workers)})"


@outside_of_graphs
def init_mesh(
    shape: Sequence[int],
    names: Sequence[str],
    *,
    workers: Sequence[str] | None = None,
    device_type: str | None = None,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
) -> WorkerMesh:
    """Make process groups and a DeviceMesh over telegrad workers, the last dimension fastest.

        mesh = telegrad.mesh.init_mesh((2, 2), ("data", "model"))
        mesh.run(train_step, batch)          # train_step(device_mesh, batch) on all four

    `workers` are names, by default all but the caller. `device_type` is "cpu" (gloo) or that of the
    accelerator (NCCL), which is the default where there is one. `host` is the address at which the
    workers reach the first of them. `timeout` bounds each collective, in seconds.
    """
    shape, names = tuple(shape), tuple(names)
    if len(shape) != len(names):
        raise ValueError(f"A mesh of shape {shape} needs {len(shape)} names, not {len(names)}.")
    if workers is None:
        here = get_worker_info().name
        workers = [info.name for info in get_worker_infos() if info.name != here]
    size = math.prod(shape)
    if len(workers) != size:
        raise ValueError(
            f"A mesh of shape {shape} needs {size} workers, but there are {len(workers)}: "
            f"{', '.join(workers)}. Choose them with workers=[...]."
        )
    port = rpc_sync(workers[0], free_port, (host,))
    world = secrets.randbits(62)
    futures = [
        rpc_async(
            worker,
            _join,
            (rank, size, host, port, world, shape, names, device_type, timeout),
            timeout=timeout,
        )
        for rank, worker in enumerate(workers)
    ]
    for future in futures:
        future.wait()
    return WorkerMesh(tuple(workers), shape, names)


def current_mesh() -> DeviceMesh:
    """The mesh that the calling worker is part of."""
    if _mesh is None:
        raise TelegradError(
            f"Worker {get_worker_info().name!r} is part of no mesh: call "
            "telegrad.mesh.init_mesh first, with this worker among its workers."
        )
    return _mesh


class _WholeGradientFrom(torch.autograd.Function):
    """The same tensor; its gradient goes on in one copy only, but is computed in all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, carries: bool) -> Tensor:
        ctx.carries = carries
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        (g,) = gradient
        return (g if ctx.carries else torch.zeros_like(g)), None


def replicate(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all workers of a mesh were given, as a DTensor."""
    first = all(place == 0 for place in mesh.get_coordinate() or ())
    one: Tensor = _WholeGradientFrom.apply(tensor, first)  # type: ignore[no-untyped-call]
    placed: DTensor = DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed


def gathered(tensor: DTensor) -> Tensor:
    """The whole tensor on every worker, as the result of a function that `run` calls.

    The caller of `run` gets one copy from each worker; whatever gradients they get are added up.
    It must use them all (their mean, say): a worker whose result is not used does not take part in
    the backward pass, and the others would wait for it in a collective.
    """
    mesh = tensor.device_mesh
    everywhere = tensor.redistribute(mesh, [Replicate()] * mesh.ndim)
    local: Tensor = everywhere.to_local(grad_placements=[Partial()] * mesh.ndim)
    return local


# On the workers.


def free_port(host: str) -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _join(
    rank: int,
    size: int,
    host: str,
    port: int,
    world: int,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    device_type: str | None,
    timeout: float,
) -> None:
    global _mesh
    if dist.is_initialized():
        raise TelegradError(
            f"Worker {get_worker_info().name!r} already has a process group: close the mesh that "
            "it is part of (WorkerMesh.close), or call torch.distributed.destroy_process_group."
        )
    from telegrad.compile.objects import guard_process_groups

    guard_process_groups()
    begin_world(world)
    accelerator = torch.accelerator.current_accelerator()
    if device_type is None:
        device_type = "cpu" if accelerator is None else accelerator.type
    backend = "gloo" if device_type == "cpu" else "nccl"
    wait = timedelta(seconds=timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, size, rank == 0, wait
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    _mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)


def _leave() -> None:
    global _mesh
    _mesh = None
    if dist.is_initialized():
        dist.destroy_process_group()
        # Rank and size of the world are folded into compiled functions without a guard.
        torch.compiler.reset()


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(current_mesh(), *args, **kwargs)
