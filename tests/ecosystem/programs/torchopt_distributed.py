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
def loss_of(
    inner: torch.Tensor, outer: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    found = torch.tanh(x.unsqueeze(1) @ inner) @ outer
    return torch.nn.functional.mse_loss(found.flatten(), y.flatten())


def main(rank: int, world_size: int) -> Any:
    import torchopt

    torch.manual_seed(0)
    inner, outer = torch.randn(4, 8, requires_grad=True), torch.randn(8, 1, requires_grad=True)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    losses: list[float] = []

    @todist.auto_init_rpc()
    @todist.rank_zero_only
    def train() -> None:
        optimizer = torchopt.Adam([inner, outer], lr=0.05)
        for _ in range(5):
            with todist.autograd.context() as context:
                # What is split is split along its first dimension, the weights too.
                loss = loss_of(inner.expand(12, 4, 8), outer.expand(12, 8, 1), x, y)
                optimizer.zero_grad()
                todist.autograd.backward(context, loss)
            optimizer.step()
            losses.append(loss.item())

    train()
    return {"losses": losses, "weights": [inner.sum().item(), outer.sum().item()]}


if __name__ == "__main__":
    run_ranks(main, 3)
