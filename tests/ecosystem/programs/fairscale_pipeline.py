"""fairscale.experimental.nn.distributed_pipeline: two partitions, micro-batches, one optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import run_ranks
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


def seeded_linear(seed: int, inputs: int, outputs: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(inputs, outputs)


class Layer(torch.nn.Module):
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = seeded_linear(seed, inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def main(rank: int, world_size: int) -> Any:
    from fairscale.experimental.nn.distributed_pipeline import (
        DistributedLoss,
        DistributedPipeline,
        PipelineModulesGraph,
    )

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    losses: list[float] = []
    if rank == 0:
        layers = [
            RemoteModule("worker1/cpu", Layer, (1, 4, 8)),
            RemoteModule("worker1/cpu", Layer, (2, 8, 8)),
            RemoteModule("worker2/cpu", Layer, (3, 8, 2)),
        ]
        graph = PipelineModulesGraph()
        graph.add_sequence(layers, [0])
        pipeline = DistributedPipeline(graph, chunks=4)
        loss_of = DistributedLoss(torch.nn.MSELoss)
        optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=0.1)
        torch.manual_seed(0)
        x, y = torch.randn(16, 4), torch.randn(16, 2)
        for _ in range(4):
            with dist_autograd.context() as context:
                loss = loss_of(pipeline(x), rpc.RRef(y)).to_here()
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            losses.append(loss.item())
    rpc.shutdown()
    return {"losses": losses}


if __name__ == "__main__":
    run_ranks(main, 3)
