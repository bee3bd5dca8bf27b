"""fairscale.experimental.nn.distributed_pipeline: two partitions, micro-batches, one optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import run_ranks
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


class Layer(torch.nn.Module):
    """Its weights are not random: layers of one worker may be made at the same time."""

    def __init__(self, scale: float, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.linspace(-scale, scale, parameter.numel())
                parameter.copy_(values.reshape(parameter.shape))

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
            RemoteModule("worker1/cpu", Layer, (0.3, 4, 8)),
            RemoteModule("worker1/cpu", Layer, (0.5, 8, 8)),
            RemoteModule("worker2/cpu", Layer, (0.7, 8, 2)),
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
