"""Pipeline: a transformer that learns Python's own manual, its layers spread over workers.

The text is the language reference that ships with Python (`pydoc_data.topics`), read character by
character. Each worker has some layers. A batch is cut into micro-batches that follow each other
through the stages (1F1B or GPipe); activations and gradients go from worker to worker, and the loss
is computed where the last layer is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from twins import Outcome, names, options, sample, seeded, show, train

import telegrad
from telegrad import autograd
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer

WIDTH, HEADS, LAYERS_PER_STAGE = 64, 4, 1
LENGTH = 48
BATCH = 16
MICRO_BATCHES = 4
RATE = 1e-3
SYMBOLS = 128


class Stage(nn.Module):
    """Some layers of the model; the first stage also embeds, the last also predicts."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        self.embed = Embed() if number == 0 else nn.Identity()
        self.layers = nn.ModuleList([build_layer() for _ in range(LAYERS_PER_STAGE)])
        self.predict = nn.Linear(WIDTH, SYMBOLS) if number == stages - 1 else nn.Identity()
        self._future = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_mask=self._future, is_causal=True)
        predicted: Tensor = self.predict(x)
        return predicted


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        embedded: Tensor = self.symbols(text) + self.places.weight
        return embedded


def build_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )


def read_manual() -> Tensor:
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "replace")))


class Manual:
    """Pieces of text, and each piece moved on by one character."""

    def __init__(self, seed: int) -> None:
        text = read_manual()
        held_out = len(text) // 10
        self._train, self._test, self._seed = text[:-held_out], text[-held_out:], seed

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return _pieces(self._train, sample(self._seed, step, BATCH, len(self._train) - LENGTH))

    def unseen(self) -> tuple[Tensor, Tensor]:
        return _pieces(self._test, torch.arange(0, len(self._test) - LENGTH, LENGTH)[:BATCH])


def _pieces(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + torch.arange(LENGTH)
    return text[places], text[places + 1]


def loss_of(logits: Tensor, expected: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), expected.flatten())


def bits(logits: Tensor, expected: Tensor) -> float:
    return loss_of(logits, expected).item() / math.log(2)


def train_job(workers: list[str], schedule: str, steps: int, seed: int) -> Outcome:
    stages = [
        RemoteModule(worker, seeded, (seed + number, Stage, number, len(workers)))
        for number, worker in enumerate(workers)
    ]
    pipeline = Pipeline(stages, MICRO_BATCHES, schedule)
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline, lr=RATE)
    manual = Manual(seed)

    def step(number: int) -> float:
        text, expected = manual.batch(number)
        with autograd.context() as context:
            loss = pipeline.forward_backward(context, text, expected, loss_of)
            optimizer.step(context)
        return loss.item()

    def measure() -> float:
        text, expected = manual.unseen()
        return bits(pipeline(text), expected)

    return train(f"{len(workers)} stages", range(steps), step, measure)


def train_twin(stages: int, steps: int, seed: int) -> Outcome:
    model = nn.Sequential(*(seeded(seed + n, Stage, n, stages) for n in range(stages)))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    manual = Manual(seed)

    def step(number: int) -> float:
        text, expected = manual.batch(number)
        optimizer.zero_grad()
        loss = loss_of(model(text), expected)
        loss.backward()
        optimizer.step()
        return loss.item()

    def measure() -> float:
        text, expected = manual.unseen()
        with torch.no_grad():
            return bits(model(text), expected)

    return train("one process", range(steps), step, measure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("A pipeline-parallel transformer language model.", steps=100, workers=2)
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    chosen = parser.parse_args(argv)
    stages = names("stage", chosen.workers)
    job = telegrad.run(
        lambda: train_job(stages, chosen.schedule, chosen.steps, chosen.seed), workers=stages
    )
    twin = train_twin(len(stages), chosen.steps, chosen.seed)
    return show("bits per character", job, twin)


if __name__ == "__main__":
    sys.exit(main())
