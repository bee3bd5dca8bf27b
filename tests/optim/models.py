"""A small model, in one process and spread over workers, with the same numbers in both."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

from telegrad.nn import RemoteModule

SEED = 5


class Layer(nn.Module):
    """A linear layer whose numbers follow from a seed, wherever it is made."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


SIZES = ((6, 5, 1), (5, 4, 2), (4, 3, 3))


class Local(nn.Module):
    """The whole model in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(*SIZES[0])
        self.middle = Layer(*SIZES[1])
        self.last = Layer(*SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Spread(nn.Module):
    """The same model: first layer on worker1, middle on worker2, last one here."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RemoteModule("worker1", Layer, SIZES[0])
        self.middle = RemoteModule("worker2", Layer, SIZES[1])
        self.last = Layer(*SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first.lazy(x)))


def batches(count: int, seed: int = SEED) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(7, 6, generator=generator), torch.randn(7, 3, generator=generator))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def stepped_once(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The state of the model in one process after one plain step on a batch, at a rate of 0.1."""
    model = Local()
    loss_of(model, batch).backward()
    optim.SGD(model.parameters(), lr=0.1).step()
    return dict(model.state_dict())
