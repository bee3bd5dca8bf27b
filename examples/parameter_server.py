"""Parameter server: weights live on servers, trainers pull them and gradients flow back.

Trainers have their shares of the digits (scikit-learn's). In each step a trainer pulls the weights
from the servers and computes its loss; the gradients return the way the weights came, are added up
on the servers, and the servers step. Nobody writes a "push": it is the backward pass of the pull.

Everything is saved every few steps. `--kill-at STEP` kills a worker in the middle. It alone is
started anew, the others stay, and training goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from twins import Outcome, count, names, options, sample, seeded, show, train

import telegrad
from telegrad import autograd, checkpoint, rpc
from telegrad.checkpoint import CheckpointError
from telegrad.demo import Digits, load_digits
from telegrad.nn import Lazy, RemoteModule
from telegrad.optim import DistributedOptimizer, StepFailed

WIDTHS = (64, 64, 32, 10)
BATCH = 32
RATE = 0.01
MOST_RESTARTS = 3
# What the driver sees of a lost worker depends on what it was doing when the worker died.
LOSSES = (rpc.WorkerLost, rpc.ReferenceLost, autograd.PassFailed, StepFailed, CheckpointError)

Weights = Mapping[str, Tensor]


class Shard(nn.Module):
    """The weights of some layers, on a server. To call it is to pull them."""

    def __init__(self, number: int, servers: int, seed: int) -> None:
        super().__init__()
        whole = seeded(seed, build_model)
        for layer, child in whole.named_children():
            if isinstance(child, nn.Linear) and int(layer) // 2 % servers == number:
                self.add_module(layer, child)

    def forward(self) -> Weights:
        return dict(self.named_parameters())


class Trainer:
    """A share of the data, and a model without weights of its own."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self._images, self._labels, self._seed = images, labels, seed
        self._model = build_model()

    def pull_and_compare(self, step: int, shards: list[Lazy[Weights]]) -> Tensor:
        """The loss on this step's batch, with weights that come straight from the servers."""
        return self.loss(step, merged([shard.to_here() for shard in shards]))

    def loss(self, step: int, weights: Weights) -> Tensor:
        rows = sample(self._seed, step, BATCH, len(self._images))
        guesses = functional_call(self._model, dict(weights), (self._images[rows],))
        return cross_entropy(guesses, self._labels[rows])


def build_model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def merged(parts: list[Weights]) -> Weights:
    return {name: weight for part in parts for name, weight in part.items()}


def shares(data: Digits, trainers: int, seed: int) -> list[tuple[Tensor, Tensor, int]]:
    """What each trainer is made of."""
    return [
        (data.train[number::trainers], data.train_labels[number::trainers], seed + number)
        for number in range(trainers)
    ]


def accuracy(weights: Weights, data: Digits) -> float:
    with torch.no_grad():
        guesses: Tensor = functional_call(build_model(), dict(weights), (data.test,)).argmax(dim=1)
    return (guesses == data.test_labels).float().mean().item()


@dataclass
class Story:
    """What happens to one training, whoever dies meanwhile."""

    directory: Path
    save_every: int
    kill_at: int | None
    victim: str
    run: dict[str, int]  # what was chosen
    made: list[int] = field(default_factory=list)  # every step, again if it was made again
    processes: list[dict[str, int]] = field(default_factory=list)  # of all workers, at each start

    def begin(self, workers: list[str]) -> None:
        self.processes.append({name: rpc.rpc_sync(name, os.getpid) for name in workers})

    def before(self, step: int) -> None:
        if step == self.kill_at:
            self.kill_at = None
            os.kill(self.processes[-1][self.victim], signal.SIGKILL)

    def after(self, step: int, contents: dict[str, Any], losses: list[float]) -> None:
        self.made.append(step)
        if len(losses) % self.save_every == 0:
            checkpoint.save(self.directory, {**contents, "losses": losses, "run": self.run})

    def resume(self, contents: dict[str, Any]) -> list[float]:
        """The losses of the steps that need not be made again."""
        if not checkpoint.exists(self.directory):
            return []
        losses: list[float] = checkpoint.load(self.directory, {**contents, "losses": []})["losses"]
        return losses

    def tell(self) -> None:
        first, last = self.processes[0], self.processes[-1]
        new = [name for name in first if first[name] != last[name]]
        again = len(self.made) - len(set(self.made))
        print(
            f"Started anew: {', '.join(new) or 'nobody'}; "
            f"the other {len(first) - len(new)} workers stayed. "
            f"{again} steps had to be made again (it saves every {self.save_every})."
        )


def run_of(chosen: argparse.Namespace) -> dict[str, int]:
    """What must be the same for a training that goes on from a checkpoint."""
    return {"seed": chosen.seed, "servers": chosen.servers, "workers": chosen.workers}


def saved_run(directory: Path) -> dict[str, int]:
    """What the training in a checkpoint was, and how far it came."""

    def look() -> dict[str, int]:
        saved = checkpoint.load(directory, {"run": None, "losses": None})
        return {**saved["run"], "steps": len(saved["losses"])}

    return telegrad.run(look, workers=0)


def train_job(
    server_names: list[str],
    trainer_names: list[str],
    data: Digits,
    steps: int,
    seed: int,
    story: Story,
) -> Outcome:
    servers = {
        name: RemoteModule(name, Shard, (number, len(server_names), seed))
        for number, name in enumerate(server_names)
    }
    trainers = [
        rpc.remote(name, Trainer, args=share)
        for name, share in zip(trainer_names, shares(data, len(trainer_names), seed), strict=True)
    ]
    optimizer = DistributedOptimizer(torch.optim.Adam, servers.values(), lr=RATE)
    contents = {**servers, "optimizer": optimizer}
    losses = story.resume(contents)

    def step(number: int) -> float:
        story.before(number)
        with autograd.context() as context:
            pulls = [server.lazy() for server in servers.values()]
            coming = [t.rpc_async().pull_and_compare(number, pulls) for t in trainers]
            loss = torch.stack([future.wait() for future in coming]).mean()
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
        story.after(number, contents, losses)
        return losses[-1]

    def measure() -> float:
        return accuracy(merged([server.state_dict() for server in servers.values()]), data)

    title = f"{len(trainers)} trainers"
    outcome = train(title, range(len(losses), steps), step, measure)
    return Outcome(losses, outcome.metric, outcome.seconds)


def train_twin(trainers: int, data: Digits, steps: int, seed: int) -> Outcome:
    model = seeded(seed, build_model)
    weights = dict(model.named_parameters())
    parts = [Trainer(*share) for share in shares(data, trainers, seed)]
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = torch.stack([part.loss(number, weights) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return train("one process", range(steps), step, lambda: accuracy(weights, data))


def run_until_done(job: Callable[[], Outcome], workers: list[str], story: Story) -> Outcome:
    """Make the job. When a worker is lost, wait for the one in its place and make the rest."""

    def attempt() -> Outcome:
        story.begin(workers)
        return job()

    def persist() -> Outcome:
        for _ in range(MOST_RESTARTS):
            try:
                return attempt()
            except LOSSES as error:
                print(f"{type(error).__name__}: {error}\nThe last checkpoint is loaded.")
            for worker in workers:
                rpc.wait_for_worker(worker)
        return attempt()

    return telegrad.run(persist, workers=workers, restarts=MOST_RESTARTS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("Parameter server, with checkpoints.", steps=200, workers=2)
    parser.add_argument("--servers", type=count, default=2, help="that share the weights (2)")
    parser.add_argument("--checkpoint", type=Path, help="directory to save in and to resume from")
    parser.add_argument("--save-every", type=count, default=20, help="steps (20)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill a worker before it")
    parser.add_argument("--kill", default="server1", metavar="WORKER", help="which (server1)")
    chosen = parser.parse_args(argv)
    servers, trainers = names("server", chosen.servers), names("trainer", chosen.workers)
    if chosen.kill not in [*servers, *trainers]:
        parser.error(f"no {chosen.kill!r} to kill: there are {', '.join([*servers, *trainers])}")
    if chosen.checkpoint and checkpoint.exists(chosen.checkpoint):
        saved = saved_run(chosen.checkpoint)
        if saved["steps"] > chosen.steps or saved != {**run_of(chosen), "steps": saved["steps"]}:
            parser.error(f"{chosen.checkpoint} has a longer training, or another one: {saved}")
    data = load_digits()
    with tempfile.TemporaryDirectory() as scratch:
        directory = chosen.checkpoint or Path(scratch)
        story = Story(directory, chosen.save_every, chosen.kill_at, chosen.kill, run_of(chosen))
        job = run_until_done(
            lambda: train_job(servers, trainers, data, chosen.steps, chosen.seed, story),
            [*servers, *trainers],
            story,
        )
    story.tell()
    twin = train_twin(len(trainers), data, chosen.steps, chosen.seed)
    return show("test accuracy", job, twin)


if __name__ == "__main__":
    sys.exit(main())
