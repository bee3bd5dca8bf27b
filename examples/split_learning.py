"""Split learning: hospitals keep their columns of the patients' data private.

Each owner has other features of the same patients (scikit-learn's breast cancer data, cut
vertically) and a network that summarizes them in a few numbers. Main has the diagnoses and the head
of the model. It names patients; summaries come, gradients go back. No feature ever leaves its
owner, and no diagnosis leaves main.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from twins import Outcome, names, options, sample, seeded, show, train

import telegrad
from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

PATIENTS, FEATURES = 569, 30
TRAINED_ON = 400
SUMMARY = 4
BATCH = 64
RATE = 0.01


class Owner(nn.Module):
    """One hospital: its columns, and what it tells about a patient."""

    def __init__(self, number: int, owners: int) -> None:
        super().__init__()
        mine = torch.arange(FEATURES).tensor_split(owners)[number]
        raw = torch.tensor(load_breast_cancer().data, dtype=torch.float32)[:, mine]
        known = raw[:TRAINED_ON]
        self._features = (raw - known.mean(dim=0)) / known.std(dim=0)
        self.layers = nn.Sequential(nn.Linear(len(mine), 8), nn.ReLU(), nn.Linear(8, SUMMARY))

    def forward(self, patients: Tensor) -> Tensor:
        summary: Tensor = self.layers(self._features[patients])
        return summary


def build_head(owners: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Linear(SUMMARY * owners, 1), nn.Flatten(0))


def diagnoses() -> Tensor:
    return torch.tensor(load_breast_cancer().target, dtype=torch.float32)


def accuracy(logits: Tensor, truth: Tensor) -> float:
    return ((logits > 0) == (truth > 0)).float().mean().item()


def train_job(owner_names: list[str], steps: int, seed: int) -> Outcome:
    count = len(owner_names)
    owners = [
        RemoteModule(name, seeded, (seed + number, Owner, number, count))
        for number, name in enumerate(owner_names)
    ]
    head, truth = seeded(seed + count, build_head, count), diagnoses()
    optimizer = DistributedOptimizer(torch.optim.Adam, [*owners, head], lr=RATE)

    def predict(patients: Tensor) -> Tensor:
        coming = [owner.forward_async(patients) for owner in owners]
        logits: Tensor = head(torch.cat([future.wait() for future in coming], dim=1))
        return logits

    def step(number: int) -> float:
        patients = sample(seed, number, BATCH, TRAINED_ON)
        with autograd.context() as context:
            loss = binary_cross_entropy_with_logits(predict(patients), truth[patients])
            autograd.backward(context, [loss])
            optimizer.step(context)
        return loss.item()

    unseen = torch.arange(TRAINED_ON, PATIENTS)
    return train(
        f"{count} owners", range(steps), step, lambda: accuracy(predict(unseen), truth[unseen])
    )


def train_twin(count: int, steps: int, seed: int) -> Outcome:
    owners = nn.ModuleList([seeded(seed + number, Owner, number, count) for number in range(count)])
    head, truth = seeded(seed + count, build_head, count), diagnoses()
    optimizer = torch.optim.Adam([*owners.parameters(), *head.parameters()], lr=RATE)

    def predict(patients: Tensor) -> Tensor:
        logits: Tensor = head(torch.cat([owner(patients) for owner in owners], dim=1))
        return logits

    def step(number: int) -> float:
        patients = sample(seed, number, BATCH, TRAINED_ON)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(predict(patients), truth[patients])
        loss.backward()
        optimizer.step()
        return loss.item()

    unseen = torch.arange(TRAINED_ON, PATIENTS)
    return train(
        "one process", range(steps), step, lambda: accuracy(predict(unseen), truth[unseen])
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("Split learning: owners keep their features private.", steps=300, workers=2)
    chosen = parser.parse_args(argv)
    owners = names("owner", chosen.workers)
    print(
        f"{FEATURES} features of {PATIENTS} patients are split between {', '.join(owners)}; "
        f"{SUMMARY} numbers per patient leave each."
    )
    job = telegrad.run(lambda: train_job(owners, chosen.steps, chosen.seed), workers=owners)
    twin = train_twin(len(owners), chosen.steps, chosen.seed)
    return show("test accuracy", job, twin)


if __name__ == "__main__":
    sys.exit(main())
