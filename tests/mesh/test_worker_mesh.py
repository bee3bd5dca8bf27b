"""A 2 x 2 mesh of workers computes with DTensor what one process does, gradients included."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad import autograd, rpc
from telegrad.mesh import WorkerMesh, gathered, init_mesh, replicate, worker_mesh
from telegrad.rpc import TelegradError


def sharded(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    """x @ w with rows over the first dimension of the mesh and columns over the second."""
    rows = replicate(x, mesh).redistribute(mesh, [Shard(0), Replicate()])
    columns = replicate(w, mesh).redistribute(mesh, [Replicate(), Shard(1)])
    return gathered((rows @ columns).tanh())


def compiled(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    return torch.compile(sharded, backend="aot_eager", fullgraph=True)(mesh, x, w)


def rows_of(mesh: DeviceMesh, x: Tensor) -> Any:
    return replicate(x, mesh).redistribute(mesh, [Shard(0)])


def mean_of_squares(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return gathered(rows_of(mesh, x).pow(2).mean())


def largest(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return gathered(rows_of(mesh, x).amax(0))


def smallest(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return gathered(rows_of(mesh, x).amin(0))


def compiled_mean(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return torch.compile(mean_of_squares, backend="aot_eager", fullgraph=True)(mesh, x)


def total(mesh: DeviceMesh, x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


_replicas: dict[bool, Any] = {}


def replicated(mesh: DeviceMesh, compiled: bool) -> None:
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(3, 2))
    _replicas[compiled] = torch.compile(module, backend="aot_eager") if compiled else module


def loss_of_replica(mesh: DeviceMesh, compiled: bool, parts: list[Tensor]) -> Tensor:
    loss: Tensor = _replicas[compiled](parts[mesh.get_rank()]).pow(2).sum()
    return loss


def gradient_of_replica(mesh: DeviceMesh, compiled: bool, context_id: int) -> Tensor:
    return autograd.get_gradients(context_id)[next(_replicas[compiled].parameters())]


def data_parallel(mesh: WorkerMesh, compiled: bool) -> None:
    """DDP in remote functions: each worker has a part of the data, all get the mean gradient."""
    mesh.run(replicated, compiled)
    parts = [torch.randn(4, 3, requires_grad=True) for _ in mesh.workers]
    torch.manual_seed(0)
    alone = nn.Linear(3, 2)
    total = sum(alone(part).pow(2).sum() for part in parts)
    weight, *inputs = torch.autograd.grad(total, [alone.weight, *parts])
    with autograd.context() as context_id:
        losses = mesh.run(loss_of_replica, compiled, parts)
        autograd.backward(context_id, [sum(losses)], timeout=60)
        for gradient in mesh.run(gradient_of_replica, compiled, context_id):
            torch.testing.assert_close(gradient, weight / len(parts))
        found = autograd.get_gradients(context_id)
        for part, expected in zip(parts, inputs, strict=True):
            torch.testing.assert_close(found[part], expected)


def everything() -> None:
    mesh = init_mesh((2, 2), ("data", "model"))
    with pytest.raises(ValueError, match="needs 6 workers"):
        init_mesh((2, 3), ("data", "model"))
    with pytest.raises(TelegradError, match="already has a process group"):
        init_mesh((4,), ("data",))
    assert [int(t[0]) for t in mesh.run(total, torch.ones(1))] == [4] * 4
    gradients_are_those_of_one_process(mesh)
    mesh.close()
    line = init_mesh((4,), ("data",))
    for is_compiled in (False, True):
        data_parallel(line, is_compiled)
    reductions_over_shards_are_differentiated(line)
    line.close()
    # Equal to the first, as far as torch can tell, but its process groups are others.
    again = init_mesh((2, 2), ("data", "model"), workers=mesh.workers[::-1])
    gradients_are_those_of_one_process(again)
    again.close()


def reductions_over_shards_are_differentiated(mesh: WorkerMesh) -> None:
    """A mean, a maximum and a minimum are partial results of another kind than a sum."""

    def mean(x: Tensor) -> Tensor:
        return x.pow(2).mean()

    def maximum(x: Tensor) -> Tensor:
        return x.amax(0)

    def minimum(x: Tensor) -> Tensor:
        return x.amin(0)

    for function, alone in (
        (mean_of_squares, mean),
        (compiled_mean, mean),
        (largest, maximum),
        (smallest, minimum),
    ):
        x = torch.randn(8, 3, requires_grad=True)
        (expected,) = torch.autograd.grad(alone(x).pow(2).sum(), [x])
        with autograd.context() as context_id:
            results = mesh.run(function, x)
            loss = sum(r.pow(2).sum() for r in results) / len(results)
            autograd.backward(context_id, [loss], timeout=60)
            found = autograd.get_gradients(context_id)
        for result in results:
            torch.testing.assert_close(result, alone(x))
        torch.testing.assert_close(found[x], expected)


def gradients_are_those_of_one_process(mesh: WorkerMesh) -> None:
    for function in (sharded, compiled):
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
        expected = torch.autograd.grad((x @ w).tanh().pow(2).sum(), [x, w])
        with autograd.context() as context_id:
            results = mesh.run(function, x, w)
            loss = sum(r.pow(2).sum() for r in results) / len(results)
            autograd.backward(context_id, [loss], timeout=60)
            found = autograd.get_gradients(context_id)
        for result in results:
            torch.testing.assert_close(result, (x @ w).tanh())
        for leaf, gradient in zip((x, w), expected, strict=True):
            torch.testing.assert_close(found[leaf], gradient)


def test_a_mesh_of_workers_gives_the_gradients_of_one_process() -> None:
    telegrad.run(everything, workers=4, seed=3)


_waiting: dict[str, Any] = {}


def hold_back() -> None:
    """Have this worker come to the next mesh too late: its store opens when the others gave up."""
    _waiting["store"] = dist.TCPStore
    go = _waiting["go"] = threading.Event()

    def late(*args: Any) -> Any:
        dist.TCPStore = _waiting["store"]
        go.wait()
        raise ConnectionError("too late")

    dist.TCPStore = late


def go_on() -> None:
    _waiting["go"].set()


def fail_to_join() -> None:
    """Have this worker fail when it joins the next mesh, as the last one that the others need."""
    made = worker_mesh.init_device_mesh

    def fails(*args: Any, **kwargs: Any) -> Any:
        worker_mesh.init_device_mesh = made
        raise LookupError("no mesh here")

    worker_mesh.init_device_mesh = fails


def makes_a_mesh(workers: list[str]) -> None:
    mesh = init_mesh((2,), ("data",), workers=workers, timeout=30)
    assert [int(t[0]) for t in mesh.run(total, torch.ones(1))] == [2, 2]
    mesh.close()


def failures() -> None:
    both = ["worker1", "worker2"]
    for shape, names, workers, sentence in (
        ((2,), ("data",), ["worker1", "worker1"], "more than once"),
        ((2, 1), ("data", "data"), both, "a name of its own"),
        ((2, 0), ("data", "model"), [], "at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            init_mesh(shape, names, workers=workers, timeout=5)
    with pytest.raises(TelegradError, match="no such worker"):
        init_mesh((2,), ("data",), workers=["worker1", "nobody"], timeout=5)
    with pytest.raises(ValueError, match="timeout=-1"):
        init_mesh((2,), ("data",), workers=both, timeout=-1)
    makes_a_mesh(both)
    # One has a process group: nobody waits for it.
    alone = init_mesh((1,), ("data",), workers=["worker2"])
    with pytest.raises(TelegradError, match="'worker2' already has a process group"):
        init_mesh((2,), ("data",), workers=both, timeout=600)
    assert alone.run(total, torch.ones(1)) == [torch.ones(1)]
    alone.close()
    # One fails when the others are part of it.
    rpc.rpc_sync("worker2", fail_to_join)
    with pytest.raises(LookupError, match="no mesh here"):
        init_mesh((2,), ("data",), workers=both, timeout=30)
    makes_a_mesh(both)
    # One takes longer than the others wait.
    rpc.rpc_sync("worker2", hold_back)
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(init_mesh, (2,), ("data",), workers=both, timeout=2)
        rpc.rpc_sync("worker1", await_undoing, (2,))
        rpc.rpc_sync("worker2", go_on)
        with pytest.raises(Exception, match=r"[Tt]ime"):
            begun.result()
    makes_a_mesh(both)


def await_undoing(times: int) -> None:
    """Returns when this worker was told so often that a mesh is given up."""
    while len(worker_mesh._given_up) < times:
        threading.Event().wait(0.05)


def test_an_init_mesh_that_fails_leaves_the_workers_free_for_the_next() -> None:
    telegrad.run(failures, workers=2)
