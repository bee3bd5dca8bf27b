"""A job of 512 workers, compiled and checked without being started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import TelegradError
from telegrad.testing import fake_job


def train() -> tuple[list[Tensor], int]:
    """Four steps over workers 1 and 511 and a mesh of all: two eager, two compiled."""
    torch.manual_seed(0)
    first, last = (RemoteModule(f"worker{n}", nn.Linear, (8, 8)) for n in (1, 511))
    optimizer = DistributedOptimizer(torch.optim.SGD, [first, last], lr=1e-3)
    mesh = init_device_mesh("cpu", (64, 8), mesh_dim_names=("data", "model"))
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compilations.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            shard = DTensor.from_local(x, mesh, [Shard(0), Replicate()], run_check=False)
            scale = shard.shape[0] / (mesh.size() * dist.get_world_size())
            loss = last(first(x) * scale).pow(2).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.detach()

    state = [first.state_dict(), last.state_dict()]
    losses = [step(torch.ones(4, 8)) for _ in range(2)]
    for module, before in zip((first, last), state, strict=True):
        module.load_state_dict(before)
    fast = torch.compile(step, backend=count, fullgraph=True)
    losses += [fast(torch.ones(4, 8)) for _ in range(2)]
    assert len(rpc.get_worker_infos()) == 512
    return losses, len(compilations)


def test_a_step_for_512_workers_compiles_as_one_graph_and_gives_what_eager_mode_gives() -> None:
    torch._dynamo.reset()
    with fake_job(512) as job:
        losses, compilations = job.run(train)
    assert compilations == 1
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[:2], losses[2:])


def test_what_was_compiled_for_one_world_is_not_used_in_another() -> None:
    fast = torch.compile(lambda x: x + dist.get_rank() * dist.get_world_size(), backend="eager")
    for size, rank in ((4, 1), (8, 5)):
        with fake_job(size, rank=rank):
            assert fast(torch.zeros(())) == size * rank


def test_the_job_is_seen_as_by_the_worker_of_that_rank() -> None:
    with fake_job(8, rank=5) as job:
        assert dist.get_rank() == 5
        assert job.run(lambda: rpc.get_worker_info().name) == "worker5"
        with pytest.raises(TelegradError, match="already has a process group"), fake_job(2):
            pass
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="has no rank 8"), fake_job(8, rank=8):
        pass


def test_a_mesh_of_one_fake_job_is_not_taken_for_that_of_another() -> None:
    def gather() -> torch.Size:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))
        shard = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate()]) * 2
        return shard.redistribute(mesh, [Replicate(), Replicate()]).to_local().shape

    for rank in (0, 5):
        with fake_job(8, rank=rank) as job:
            # Another number of groups than before, so that the names are others.
            for _ in range(rank):
                dist.new_group([0, 1])
            assert job.run(gather) == (8, 2)


@pytest.mark.parametrize("size", ["2", 0, 1.5, True])
def test_a_size_that_is_none_is_refused_in_a_sentence(size: Any) -> None:
    words = r"size=.* give a whole number"
    with pytest.raises((TypeError, ValueError), match=words), fake_job(size):
        pass
