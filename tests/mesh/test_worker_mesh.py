"""A 2 x 2 mesh of workers computes with DTensor what one process does, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import telegrad
from telegrad import autograd
from telegrad.mesh import gathered, init_mesh, replicate
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


def everything() -> None:
    mesh = init_mesh((2, 2), ("data", "model"))
    with pytest.raises(ValueError, match="needs 6 workers"):
        init_mesh((2, 3), ("data", "model"))
    with pytest.raises(TelegradError, match="already has a process group"):
        init_mesh((4,), ("data",))
    assert [int(t[0]) for t in mesh.run(total, torch.ones(1))] == [4] * 4
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
    mesh.close()
    init_mesh((4,), ("data",)).close()


def test_a_mesh_of_workers_gives_the_gradients_of_one_process() -> None:
    telegrad.run(everything, workers=4, seed=3)
