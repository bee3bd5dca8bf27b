"""What the examples share: a job and its twin, trained alike and shown beside each other.

The job spreads a model over workers. Its twin is the same model in one process, without telegrad,
from the same seed and on the same batches. Where the math is the same, so are the losses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from telegrad.demo import ProgressBar

T = TypeVar("T")

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    metric: float
    seconds: float


def train(
    title: str, steps: range, step: Callable[[int], float], measure: Callable[[], float]
) -> Outcome:
    """Make the steps behind a progress bar, then measure what was learned."""
    bar = ProgressBar(title, max(len(steps), 1))
    began = time.monotonic()
    losses = []
    for number in steps:
        losses.append(step(number))
        bar.advance(f"loss {losses[-1]:.4f}")
    seconds = time.monotonic() - began
    bar.close()
    return Outcome(losses, measure(), seconds)


def show(metric: str, job: Outcome, twin: Outcome, tolerance: float = _TOLERANCE) -> int:
    """Print both beside each other. Returns an exit code: 1 if their losses differ."""
    gaps = [abs(a - b) for a, b in zip(job.losses, twin.losses, strict=True)]
    width = max(16, len(metric) + 2)
    print()
    print(f"{'':{width}}{'over workers':>14}{'one process':>14}")
    print(f"{'first loss':{width}}{job.losses[0]:14.6f}{twin.losses[0]:14.6f}")
    print(f"{'last loss':{width}}{job.losses[-1]:14.6f}{twin.losses[-1]:14.6f}")
    print(f"{metric:{width}}{job.metric:14.4f}{twin.metric:14.4f}")
    print(f"{'seconds':{width}}{job.seconds:14.1f}{twin.seconds:14.1f}")
    print()
    if not all(gap <= tolerance for gap in gaps):  # a NaN agrees with nothing
        print(f"The losses differ by {max(gaps):.1e}, and should not by {tolerance:.0e}: a bug.")
        return 1
    print(f"The losses of all {len(gaps)} steps agree to {max(gaps):.1e}.")
    return 0


def options(purpose: str, *, steps: int, workers: int | None = None) -> argparse.ArgumentParser:
    """The options that examples share; without `workers` their number is fixed."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--steps", type=count, default=steps, help=f"of training ({steps})")
    if workers is not None:
        parser.add_argument("--workers", type=count, default=workers, help=f"({workers})")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (0)")
    # As each worker has: with more threads, sums are added in another order.
    torch.set_num_threads(1)
    return parser


def count(text: str) -> int:
    """For options: a whole number of at least one."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least one")
    return number


def names(role: str, number: int) -> list[str]:
    return [f"{role}{each}" for each in range(1, number + 1)]


def seeded(seed: int, make: Callable[..., T], *args: object) -> T:
    """What `make(*args)` makes of random numbers is the same on every worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args)


def sample(seed: int, step: int, size: int, count: int) -> Tensor:
    """The rows of one step's batch, `size` different ones of `count`."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    return torch.randperm(count, generator=generator)[:size]
