"""`telegrad demo`: one model, cut into stages that live on different workers.

Each stage is an object on a worker of its own, held by reference. The forward pass calls stage
after stage; `telegrad.autograd.backward` sends the gradients back the same way; each worker then
steps its own parameters. The same model, from the same seed and on the same batches, is trained
in this process too: the losses of the two must be equal, step by step.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from telegrad import autograd, rpc
from telegrad.launch.local import run

_WIDTH = 64
_CLASSES = 10
_BATCH = 64
_RATE = 0.5
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits as rows of numbers, and what they show."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    accuracy: float
    seconds: float


class Model(Protocol):
    """What the training loop asks of a model, wherever its stages are."""

    def step(self, images: Tensor, labels: Tensor) -> float: ...

    def predict(self, images: Tensor) -> Tensor: ...


class Stage:
    """A part of the model, on the worker that owns it."""

    def __init__(self, number: int, stages: int, seed: int) -> None:
        self._layers = build_stage(number, stages, seed)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._layers(x)
        return y

    def predict(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.forward(x)

    def step(self, context: int) -> None:
        """Plain gradient descent with the gradients that this worker has in the context."""
        gradients = autograd.get_gradients(context)
        with torch.no_grad():
            for parameter in self._layers.parameters():
                parameter.sub_(gradients[parameter], alpha=_RATE)


class SplitModel:
    """The model as references to its stages."""

    def __init__(self, workers: list[str], seed: int) -> None:
        self._stages = [
            rpc.remote(worker, Stage, args=(number, len(workers), seed))
            for number, worker in enumerate(workers)
        ]

    def step(self, images: Tensor, labels: Tensor) -> float:
        with autograd.context() as context:
            for stage in self._stages:
                images = stage.rpc_sync().forward(images)
            loss = cross_entropy(images, labels)
            autograd.backward(context, [loss])
            for future in [stage.rpc_async().step(context) for stage in self._stages]:
                future.wait()
        return loss.item()

    def predict(self, images: Tensor) -> Tensor:
        for stage in self._stages:
            images = stage.rpc_sync().predict(images)
        return images


class WholeModel:
    """The same stages in this process, without telegrad."""

    def __init__(self, stages: int, seed: int) -> None:
        self._layers = nn.Sequential(*(build_stage(n, stages, seed) for n in range(stages)))
        self._optimizer = torch.optim.SGD(self._layers.parameters(), lr=_RATE)

    def step(self, images: Tensor, labels: Tensor) -> float:
        self._optimizer.zero_grad()
        loss = cross_entropy(self._layers(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()

    def predict(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self._layers(images)
        return y


def build_stage(number: int, stages: int, seed: int) -> nn.Sequential:
    """The same numbers wherever it is called; the last stage ends in the classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + number)
        if number == stages - 1:
            return nn.Sequential(nn.Linear(_WIDTH, _CLASSES))
        return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU())


def load_digits() -> Digits:
    """1797 images of 8 by 8 points, which come inside scikit-learn."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return Digits(images[train], labels[train], images[test], labels[test])


def train(model: Model, data: Digits, *, epochs: int, seed: int, title: str) -> Outcome:
    shuffle = torch.Generator().manual_seed(seed)
    batches = -(-len(data.train) // _BATCH)
    bar = ProgressBar(title, epochs * batches)
    losses = []
    began = time.monotonic()
    for _ in range(epochs):
        order = torch.randperm(len(data.train), generator=shuffle)
        for batch in torch.split(order, _BATCH):
            losses.append(model.step(data.train[batch], data.train_labels[batch]))
            bar.advance(f"loss {losses[-1]:.4f}")
    seconds = time.monotonic() - began
    bar.close()
    guesses = model.predict(data.test).argmax(dim=1)
    accuracy = (guesses == data.test_labels).float().mean().item()
    return Outcome(losses, accuracy, seconds)


class ProgressBar:
    """One line on standard error that grows; in a log, one line for each tenth."""

    _CELLS = 30

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._drawn = 0.0
        self._on_terminal = sys.stderr.isatty()

    def advance(self, note: str) -> None:
        self._done += 1
        if self._is_due():
            self._draw(note)

    def close(self) -> None:
        if self._on_terminal:
            print(file=sys.stderr)

    def _is_due(self) -> bool:
        if self._done == self._total:
            return True
        if not self._on_terminal:
            return self._done * 10 // self._total > (self._done - 1) * 10 // self._total
        now = time.monotonic()
        due = now - self._drawn > 0.1
        if due:
            self._drawn = now
        return due

    def _draw(self, note: str) -> None:
        filled = self._CELLS * self._done // self._total
        cells = "#" * filled + "." * (self._CELLS - filled)
        percent = 100 * self._done // self._total
        line = f"{self._title:<16} [{cells}] {percent:3d}%  {note}"
        start, end = ("\r", "") if self._on_terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def demo(*, workers: int, epochs: int, seed: int) -> int:
    """Train split and whole, and print both beside each other. Returns an exit code."""
    try:
        data = load_digits()
    except ImportError:
        print(
            "telegrad demo needs the digits of scikit-learn: pip install 'telegrad[demo]'",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)  # as each worker has: with more, sums are added in another order
    names = [f"worker{number}" for number in range(1, workers + 1)]
    print(f"A model of {workers} stages, one on each of {', '.join(names)} (seed {seed}).")

    def train_split() -> Outcome:
        for name in names:
            print(f"  {name} is process {rpc.rpc_sync(name, os.getpid)}")
        model = SplitModel(names, seed)
        return train(model, data, epochs=epochs, seed=seed, title=f"{workers} workers")

    split = run(train_split, workers=names)
    model = WholeModel(workers, seed)
    whole = train(model, data, epochs=epochs, seed=seed, title="one process")
    return _report(split, whole)


def _report(split: Outcome, whole: Outcome) -> int:
    gap = max(abs(a - b) for a, b in zip(split.losses, whole.losses, strict=True))
    print()
    print(f"{'':16}{'over workers':>14}{'one process':>14}")
    print(f"{'first loss':16}{split.losses[0]:14.6f}{whole.losses[0]:14.6f}")
    print(f"{'last loss':16}{split.losses[-1]:14.6f}{whole.losses[-1]:14.6f}")
    print(f"{'test accuracy':16}{split.accuracy:14.2%}{whole.accuracy:14.2%}")
    print(f"{'seconds':16}{split.seconds:14.1f}{whole.seconds:14.1f}")
    print()
    if gap > _TOLERANCE:
        print(f"The losses differ by up to {gap:.1e}, and should not by {_TOLERANCE:.0e}: a bug.")
        return 1
    print(f"The losses of all {len(split.losses)} steps agree to {gap:.1e}: the same gradients.")
    return 0
