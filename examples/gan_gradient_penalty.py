"""GAN with gradient penalty: a loss that is made of gradients which crossed workers.

The generator is on one worker, the critic in two halves on others. The critic of a WGAN-GP is asked
to have slopes of length one between real and generated digits: its slope is the result of a
backward pass over all its workers (`create_graph=True`), and the penalty on it is differentiated
once more, through that pass.

Double precision, because two networks that play against each other amplify every rounding: after
some hundred moves in single precision no two ways of adding up would agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from twins import Outcome, options, sample, seeded, show, train

import telegrad
from telegrad import autograd
from telegrad.demo import load_digits
from telegrad.nn import Lazy, RemoteModule
from telegrad.optim import DistributedOptimizer

PIXELS, NOISE, WIDTH = 64, 16, 64
BATCH = 64
PENALTY = 10.0
CRITIC_STEPS = 3
RATE, BETAS = 2e-3, (0.5, 0.9)
WORKERS = ("generator", "critic1", "critic2")

Net = Callable[[Tensor], Tensor]


def build_generator() -> nn.Sequential:
    layers = (nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, PIXELS), nn.Sigmoid())
    return nn.Sequential(*layers).double()


def build_critic_front() -> nn.Sequential:
    return nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.SiLU()).double()


def build_critic_back() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)).double()


class Draws:
    """Real digits, noise, and points between: the same in the job and its twin."""

    def __init__(self, seed: int) -> None:
        self._digits, self._seed = load_digits().train.double(), seed

    def real(self, step: int) -> Tensor:
        return self._digits[sample(self._seed, step, BATCH, len(self._digits))]

    def noise(self, step: int, rows: int = BATCH) -> Tensor:
        return torch.randn(rows, NOISE, generator=self._generator(2 * step), dtype=torch.double)

    def between(self, step: int, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(BATCH, 1, generator=self._generator(2 * step + 1), dtype=torch.double)
        return (share * real + (1 - share) * fake).detach().requires_grad_()

    def distance(self, fake: Tensor) -> float:
        """The Fréchet distance between generated and all real digits, as points."""
        return frechet_distance(self._digits, fake)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed << 40) + number)


def frechet_distance(a: Tensor, b: Tensor) -> float:
    product = torch.cov(a.T) @ torch.cov(b.T)
    overlap = torch.linalg.eigvals(product).real.clamp_min(0).sqrt().sum()
    spread = a.var(dim=0).sum() + b.var(dim=0).sum() - 2 * overlap
    return float((a.mean(dim=0) - b.mean(dim=0)).square().sum() + spread)


def critic_loss(critic: Net, real: Tensor, fake: Tensor, slopes: Tensor) -> Tensor:
    penalty = (slopes.norm(dim=1) - 1).square().mean()
    loss: Tensor = critic(fake).mean() - critic(real).mean() + PENALTY * penalty
    return loss


def train_job(steps: int, seed: int) -> Outcome:
    generator = RemoteModule("generator", seeded, (seed, build_generator))
    front = RemoteModule("critic1", seeded, (seed + 1, build_critic_front))
    back = RemoteModule("critic2", seeded, (seed + 2, build_critic_back))
    ours = DistributedOptimizer(torch.optim.Adam, generator, lr=RATE, betas=BETAS)
    theirs = DistributedOptimizer(torch.optim.Adam, [front, back], lr=RATE, betas=BETAS)
    draws = Draws(seed)

    def critic(images: Tensor | Lazy[Tensor]) -> Tensor:
        verdict: Tensor = back(front.lazy(images))
        return verdict

    def train_critic(number: int) -> float:
        real, fake = draws.real(number), generator(draws.noise(number))
        with autograd.context() as context:
            middle = draws.between(number, real, fake)
            verdict = critic(middle).sum()
            autograd.backward(context, [verdict], create_graph=True)
            slopes = autograd.get_gradients(context)[middle]
            loss = critic_loss(critic, real, fake, slopes)
            # The passes of a context add up. Only the second is to count for the weights: what the
            # first one, which was run for the slopes, left there is taken back by `- verdict`.
            autograd.backward(context, [loss - verdict])
            theirs.step(context)
        return loss.item()

    def step(number: int) -> float:
        first = number * CRITIC_STEPS
        loss = [train_critic(n) for n in range(first, first + CRITIC_STEPS)][-1]
        with autograd.context() as context:
            verdict = critic(generator.lazy(draws.noise(first)))
            autograd.backward(context, [-verdict.mean()])
            ours.step(context)
        return loss

    def measure() -> float:
        return draws.distance(generator(draws.noise(-1, 1000)))

    return train("3 workers", range(steps), step, measure)


def train_twin(steps: int, seed: int) -> Outcome:
    generator = seeded(seed, build_generator)
    critic = nn.Sequential(
        seeded(seed + 1, build_critic_front), seeded(seed + 2, build_critic_back)
    )
    ours = torch.optim.Adam(generator.parameters(), lr=RATE, betas=BETAS)
    theirs = torch.optim.Adam(critic.parameters(), lr=RATE, betas=BETAS)
    draws = Draws(seed)

    def train_critic(number: int) -> float:
        real, fake = draws.real(number), generator(draws.noise(number)).detach()
        middle = draws.between(number, real, fake)
        (slopes,) = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)
        loss = critic_loss(critic, real, fake, slopes)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        return loss.item()

    def step(number: int) -> float:
        first = number * CRITIC_STEPS
        loss = [train_critic(n) for n in range(first, first + CRITIC_STEPS)][-1]
        ours.zero_grad()
        (-critic(generator(draws.noise(first))).mean()).backward()
        ours.step()
        return loss

    def measure() -> float:
        with torch.no_grad():
            return draws.distance(generator(draws.noise(-1, 1000)))

    return train("one process", range(steps), step, measure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("GAN with gradient penalty.", steps=100)
    chosen = parser.parse_args(argv)
    job = telegrad.run(lambda: train_job(chosen.steps, chosen.seed), workers=WORKERS)
    twin = train_twin(chosen.steps, chosen.seed)
    return show("Frechet distance", job, twin)


if __name__ == "__main__":
    sys.exit(main())
