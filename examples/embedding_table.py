"""Embedding table: rows over several workers, because no one of them could hold it.

A table of n-grams of Python's own manual is used to guess the next character: the last one, two,
... five characters are hashed to rows, whose sum says what comes next. Each worker has a shard of
the rows. A step asks each shard for the rows that it needs; gradients come back for these rows
only (`sparse=True`), so a step costs the same however large the table is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from twins import Outcome, count, names, options, sample, seeded, show, train

import telegrad
from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

SYMBOLS, GRAMS, WIDTH = 128, 5, 16
BATCH = 512
RATE = 0.2

LookUp = Callable[[Tensor], Tensor]
"""The rows of the table with these numbers."""


def build_shard(rows: int) -> nn.Embedding:
    # torch warns of every worker that did not say whether it wants these checks.
    torch.sparse.check_sparse_tensor_invariants.disable()
    shard = nn.Embedding(rows, WIDTH, sparse=True)
    nn.init.normal_(shard.weight, std=0.1)
    return shard


def build_head() -> nn.Linear:
    return nn.Linear(WIDTH, SYMBOLS)


class Manual:
    """Characters of the text, and for each the rows of the n-grams that end before it."""

    def __init__(self, rows: int, seed: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self._text = torch.tensor(list(text.encode("ascii", "replace")))
        self._rows, self._seed = rows, seed
        self._trained_on = len(self._text) * 9 // 10

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._at(GRAMS + sample(self._seed, step, BATCH, self._trained_on - GRAMS))

    def unseen(self) -> tuple[Tensor, Tensor]:
        return self._at(torch.arange(self._trained_on, len(self._text))[:4096])

    def _at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        columns = []
        gram = torch.zeros_like(places)
        for length in range(1, GRAMS + 1):
            gram = (gram * 1000003 + self._text[places - length] + length) % 2147483647
            columns.append(gram % self._rows)
        return torch.stack(columns, dim=1), self._text[places]


def loss_of(look_up: LookUp, head: nn.Linear, grams: Tensor, following: Tensor) -> Tensor:
    rows, back = grams.unique(return_inverse=True)
    return cross_entropy(head(look_up(rows)[back].sum(dim=1)), following)


def bits(look_up: LookUp, head: nn.Linear, manual: Manual) -> float:
    with torch.no_grad():
        return loss_of(look_up, head, *manual.unseen()).item() / math.log(2)


def train_job(workers: list[str], rows: int, steps: int, seed: int) -> Outcome:
    each = rows // len(workers)
    shards = [
        RemoteModule(worker, seeded, (seed + 1 + number, build_shard, each))
        for number, worker in enumerate(workers)
    ]
    head, manual = seeded(seed, build_head), Manual(each * len(shards), seed)
    optimizer = DistributedOptimizer(torch.optim.Adagrad, [*shards, head], lr=RATE)

    def look_up(wanted: Tensor) -> Tensor:
        """`wanted` is in order, so the answers of the shards follow each other."""
        parts = [wanted[wanted // each == n] - n * each for n in range(len(shards))]
        coming = [shard.forward_async(p) for shard, p in zip(shards, parts, strict=True)]
        return torch.cat([future.wait() for future in coming])

    def step(number: int) -> float:
        with autograd.context() as context:
            loss = loss_of(look_up, head, *manual.batch(number))
            autograd.backward(context, [loss])
            optimizer.step(context)
        return loss.item()

    title = f"{len(shards)} shards"
    return train(title, range(steps), step, lambda: bits(look_up, head, manual))


def train_twin(shards: int, rows: int, steps: int, seed: int) -> Outcome:
    each = rows // shards
    parts = [seeded(seed + 1 + n, build_shard, each).weight for n in range(shards)]
    table = nn.Embedding.from_pretrained(torch.cat(parts).detach(), freeze=False, sparse=True)
    head, manual = seeded(seed, build_head), Manual(each * shards, seed)
    optimizer = torch.optim.Adagrad([*table.parameters(), *head.parameters()], lr=RATE)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(table, head, *manual.batch(number))
        loss.backward()
        optimizer.step()
        return loss.item()

    return train("one process", range(steps), step, lambda: bits(table, head, manual))


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("An embedding table over several workers.", steps=300, workers=3)
    parser.add_argument("--rows", type=count, default=600_000, help="of the whole table (600000)")
    chosen = parser.parse_args(argv)
    if chosen.rows < chosen.workers:
        parser.error(f"--rows {chosen.rows}: each of {chosen.workers} workers needs one at least")
    workers = names("shard", chosen.workers)
    size = chosen.rows * WIDTH * 4 / 1e6
    print(
        f"A table of {chosen.rows} rows, {size:.1f} MB and as much again for its optimizer: "
        f"{2 * size / len(workers):.1f} MB on each of {', '.join(workers)}."
    )
    job = telegrad.run(
        lambda: train_job(workers, chosen.rows, chosen.steps, chosen.seed), workers=workers
    )
    twin = train_twin(len(workers), chosen.rows, chosen.steps, chosen.seed)
    return show("bits per character", job, twin)


if __name__ == "__main__":
    sys.exit(main())
