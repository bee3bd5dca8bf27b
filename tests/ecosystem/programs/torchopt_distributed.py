"""torchopt.distributed: a loss over all workers, and its gradient through them."""

from __future__ import annotations

from typing import Any

import torch
import torchopt.distributed as todist
from ranks import run_ranks


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=True),
    reducer=todist.mean_reducer,
)
def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def main(rank: int, world_size: int) -> Any:
    import torchopt

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    losses: list[float] = []

    @todist.auto_init_rpc()
    @todist.rank_zero_only
    def train() -> None:
        optimizer = torchopt.Adam(model.parameters(), lr=0.05)
        for _ in range(5):
            with todist.autograd.context() as context:
                loss = loss_of(model, x, y)
                optimizer.zero_grad()
                todist.autograd.backward(context, loss)
            optimizer.step()
            losses.append(loss.item())

    train()
    return {"losses": losses, "weights": [p.sum().item() for p in model.parameters()]}


if __name__ == "__main__":
    run_ranks(main, 3)
