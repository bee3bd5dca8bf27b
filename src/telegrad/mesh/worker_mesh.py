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

import contextlib
import math
import secrets
import socket
import threading
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
from telegrad.rpc.arguments import check_seconds, check_whole
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.outside import outside_of_graphs

_mesh: DeviceMesh | None = None
_world: int | None = None
"""The number of the world that the mesh is of."""
_joining = threading.Lock()
"""Held by whoever joins a world, until it is part of it or has given up."""
_given_up: set[int] = set()
"""Worlds that were undone. A worker may be told so before it is told to join."""


class WorkerMesh:
    """Workers arranged in a grid. Made by `init_mesh`."""

    def __init__(
        self, workers: tuple[str, ...], shape: tuple[int, ...], names: tuple[str, ...]
    ) -> None:
        self.workers = workers
        self.shape = shape
        self.names = names

    @outside_of_graphs
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
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
    _check_grid(shape, names)
    check_seconds("timeout", timeout)
    members = _members(math.prod(shape), shape, workers)
    _on_all(members, _refuse_two_groups, (), timeout)
    port = rpc_sync(members[0], free_port, (host,))
    world = secrets.randbits(62)
    futures = [
        rpc_async(
            worker,
            _join,
            (rank, len(members), host, port, world, shape, names, device_type, timeout),
            timeout=timeout,
        )
        for rank, worker in enumerate(members)
    ]
    try:
        for future in futures:
            future.wait()
    except BaseException:
        _undo(members, world, timeout)
        raise
    return WorkerMesh(members, shape, names)


def _check_grid(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    if len(shape) != len(names):
        raise ValueError(f"A mesh of shape {shape} needs {len(shape)} names, not {len(names)}.")
    for size in shape:
        check_whole("Each size in shape", size, 1)
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1:
            raise ValueError(
                f"Each dimension of a mesh needs a name of its own, but names={names!r}."
            )


def _members(size: int, shape: tuple[int, ...], workers: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the workers that a mesh is to have."""
    if workers is None:
        here = get_worker_info().name
        members = [info.name for info in get_worker_infos() if info.name != here]
    else:
        members = [get_worker_info(worker).name for worker in workers]
    if len(members) != size:
        raise ValueError(
            f"A mesh of shape {shape} needs {size} workers, but there are {len(members)}: "
            f"{', '.join(members)}. Choose them with workers=[...]."
        )
    for worker in members:
        if members.count(worker) > 1:
            raise ValueError(
                f"Worker {worker!r} is there more than once in workers={members}. Each place of a "
                "mesh needs a worker of its own."
            )
    return tuple(members)


def _on_all(
    workers: Sequence[str], function: Callable[..., None], args: tuple[Any, ...], timeout: float
) -> None:
    for future in [rpc_async(worker, function, args, timeout=timeout) for worker in workers]:
        future.wait()


def _undo(workers: Sequence[str], world: int, timeout: float) -> None:
    """Nobody is to be part of that world, so that the workers can form another. Those that wait in
    it for the others do so until `timeout`."""
    for future in [
        rpc_async(worker, _give_up, (world,), timeout=2 * timeout + _PATIENCE) for worker in workers
    ]:
        # A worker that is gone is part of nothing; what went wrong first is what matters.
        with contextlib.suppress(TelegradError):
            future.wait()


_PATIENCE = 10.0
"""Seconds for a worker to notice that its own wait is over."""


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
    replicated = [Replicate()] * mesh.ndim
    everywhere = tensor.redistribute(mesh, replicated)
    if any(place.is_partial() and place != Partial() for place in tensor.placements):
        # What goes back is a sum, which cannot become a part of a mean or of a maximum. Going
        # forward this does nothing; going back it adds up first.
        everywhere = everywhere.redistribute(mesh, replicated)
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
    with _joining:
        if world in _given_up:
            raise TelegradError(
                f"Worker {get_worker_info().name!r} joins a mesh that was given up: call init_mesh "
                "again."
            )
        _refuse_two_groups()
        try:
            _form(rank, size, host, port, world, shape, names, device_type, timeout)
        except BaseException:
            _leave()
            raise


def _refuse_two_groups() -> None:
    if dist.is_initialized():
        raise TelegradError(
            f"Worker {get_worker_info().name!r} already has a process group: close the mesh that "
            "it is part of (WorkerMesh.close), or call torch.distributed.destroy_process_group."
        )


def _form(
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
    global _mesh, _world
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
    _world = world


def _give_up(world: int) -> None:
    """Leave the world of that number, if this worker is part of it; it may still wait to be."""
    _given_up.add(world)
    with _joining:
        if _world == world:
            _leave()


def _leave() -> None:
    global _mesh, _world
    _mesh = _world = None
    if dist.is_initialized():
        dist.destroy_process_group()
        # Rank and size of the world are folded into compiled functions without a guard.
        torch.compiler.reset()


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(current_mesh(), *args, **kwargs)
