"""A 2 x 2 mesh of workers computes with DTensor what one process does, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad import autograd
from telegrad.mesh import WorkerMesh, gathered, init_mesh, replicate
from telegrad.rpc import TelegradError


def sharded(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    """x @ w with rows over the first dimension of the mesh and columns over the second."""
    rows = replicate(x, mesh).redistribute(mesh, [Shard(0), Replicate()])
    columns = replicate(w, mesh).redistribute(mesh, [Replicate(), Shard(1)])
    return gathered((rows @ columns).tanh())


def compiled(mesh: DeviceMesh, x: Tensor, w: Tensor) -> Tensor:
    return torch.compile(sharded, backend="aot_eager", fullgraph=True)(mesh, x, w)


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
    line.close()
    # Equal to the first, as far as torch can tell, but its process groups are others.
    again = init_mesh((2, 2), ("data", "model"), workers=mesh.workers[::-1])
    gradients_are_those_of_one_process(again)
    again.close()


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
