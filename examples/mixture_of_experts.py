"""Mixture of experts: a gate sends each digit to the two experts that it trusts most.

The gate is here, the experts are on workers. Only the chosen rows travel to an expert, all experts
work at once, and the gradients of gate and experts come from one backward pass. An expert that
nobody chose is not called, gets no gradient, and its optimizer leaves it alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from twins import Outcome, count, names, options, sample, seeded, show, train

import telegrad
from telegrad import autograd
from telegrad.demo import Digits, load_digits
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

PIXELS, WIDTH, CLASSES = 64, 32, 10
CHOSEN = 2
BALANCE = 0.01
BATCH = 64
RATE = 0.01

Ask = Callable[[dict[int, Tensor]], dict[int, Tensor]]
"""Give experts, by number, their rows; what they make of them."""


def build_expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def mix(gate: nn.Linear, ask: Ask, images: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of each class's probability, and how unevenly the experts are used."""
    trust = gate(images).softmax(dim=1)
    weights, choices = trust.topk(CHOSEN, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    experts = trust.shape[1]
    rows = {e: (choices == e).any(dim=1).nonzero().flatten() for e in range(experts)}
    answers = ask({e: images[mine] for e, mine in rows.items() if len(mine)})
    mixed = torch.zeros(len(images), CLASSES)
    for expert, answer in answers.items():
        mine = rows[expert]
        weight = (weights[mine] * (choices[mine] == expert)).sum(dim=1, keepdim=True)
        mixed = mixed.index_add(0, mine, weight * answer.softmax(dim=1))
    used = torch.stack([torch.tensor(len(rows[e]) / len(images)) for e in range(experts)])
    return mixed.clamp_min(1e-9).log(), experts * (used * trust.mean(dim=0)).sum()


def loss_of(gate: nn.Linear, ask: Ask, images: Tensor, labels: Tensor) -> Tensor:
    guesses, imbalance = mix(gate, ask, images)
    return nll_loss(guesses, labels) + BALANCE * imbalance


def accuracy(gate: nn.Linear, ask: Ask, data: Digits) -> float:
    with torch.no_grad():
        guesses, _ = mix(gate, ask, data.test)
    return (guesses.argmax(dim=1) == data.test_labels).float().mean().item()


def build_gate(experts: int) -> nn.Linear:
    return nn.Linear(PIXELS, experts)


def train_job(workers: list[str], count: int, data: Digits, steps: int, seed: int) -> Outcome:
    gate = seeded(seed, build_gate, count)
    experts = [
        RemoteModule(workers[number % len(workers)], seeded, (seed + 1 + number, build_expert))
        for number in range(count)
    ]
    optimizer = DistributedOptimizer(torch.optim.Adam, [gate, *experts], lr=RATE)

    def ask(questions: dict[int, Tensor]) -> dict[int, Tensor]:
        coming = {e: experts[e].forward_async(rows) for e, rows in questions.items()}
        return {e: future.wait() for e, future in coming.items()}

    def step(number: int) -> float:
        rows = sample(seed, number, BATCH, len(data.train))
        with autograd.context() as context:
            loss = loss_of(gate, ask, data.train[rows], data.train_labels[rows])
            autograd.backward(context, [loss])
            optimizer.step(context)
        return loss.item()

    title = f"{count} experts"
    return train(title, range(steps), step, lambda: accuracy(gate, ask, data))


def train_twin(count: int, data: Digits, steps: int, seed: int) -> Outcome:
    gate = seeded(seed, build_gate, count)
    experts = nn.ModuleList([seeded(seed + 1 + number, build_expert) for number in range(count)])
    optimizer = torch.optim.Adam([*gate.parameters(), *experts.parameters()], lr=RATE)

    def ask(questions: dict[int, Tensor]) -> dict[int, Tensor]:
        return {e: experts[e](rows) for e, rows in questions.items()}

    def step(number: int) -> float:
        rows = sample(seed, number, BATCH, len(data.train))
        optimizer.zero_grad()
        loss = loss_of(gate, ask, data.train[rows], data.train_labels[rows])
        loss.backward()
        optimizer.step()
        return loss.item()

    return train("one process", range(steps), step, lambda: accuracy(gate, ask, data))


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("Mixture of experts that live on workers.", steps=200, workers=2)
    parser.add_argument("--experts", type=count, default=4, help="over all workers (4)")
    chosen = parser.parse_args(argv)
    workers, data = names("worker", chosen.workers), load_digits()
    job = telegrad.run(
        lambda: train_job(workers, chosen.experts, data, chosen.steps, chosen.seed),
        workers=workers,
    )
    twin = train_twin(chosen.experts, data, chosen.steps, chosen.seed)
    return show("test accuracy", job, twin)


if __name__ == "__main__":
    sys.exit(main())
