"""Actor-learner: actors balance poles on carts, a learner learns from what they lived through.

Actors play with a copy of the policy; what they experience goes straight to the learner's worker,
never through main. While the learner learns from one round the actors already play the next one,
with a policy that is one step old; the learner corrects for that with the ratio of the new to the
old probabilities of the actions (clipped, as in PPO).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from twins import Outcome, names, options, seeded, show, train

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import Lazy, RemoteModule
from telegrad.optim import DistributedOptimizer

CARTS, MOVES = 8, 48
DISCOUNT, SMOOTHING = 0.98, 0.95
CLIP = 0.2
RATE = 0.01
LONGEST = 500

Weights = dict[str, Tensor]


class CartPoles:
    """Carts that are pushed left or right to keep their poles up (Barto, Sutton, Anderson 1983).

    A row of `state` is place, speed, angle and angular speed.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.state = self._fresh(count)

    def _fresh(self, count: int) -> Tensor:
        return torch.rand(count, 4, generator=self._generator) * 0.1 - 0.05

    def draw(self, probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(1)

    def push(self, right: Tensor) -> Tensor:
        """Move on by 20 ms. Which poles fell; their carts begin anew."""
        _, speed, angle, turning = self.state.unbind(dim=1)
        sine, cosine = angle.sin(), angle.cos()
        pull = (right * 20.0 - 10.0 + 0.05 * turning.square() * sine) / 1.1
        turn = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        push = pull - 0.05 * turn * cosine / 1.1
        change = torch.stack([speed, push, turning, turn], dim=1)
        self.state = self.state + 0.02 * change
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        self.state = torch.where(fell[:, None], self._fresh(len(fell)), self.state)
        return fell


@dataclass(frozen=True)
class Experience:
    """One row per move, one column per cart; `seen` has one row more."""

    seen: Tensor
    pushed: Tensor
    probability: Tensor  # that the actor gave to what it did, as a logarithm
    fell: Tensor


class Policy(nn.Module):
    """Scores of both pushes, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.scores = nn.Linear(64, 2)
        self.value = nn.Linear(64, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.scores(hidden).log_softmax(dim=-1), self.value(hidden).squeeze(-1)


class Actor:
    """Carts of its own, which go on from round to round."""

    def __init__(self, seed: int) -> None:
        self._carts = CartPoles(CARTS, seed)
        self._policy = Policy()

    def play(self, weights: Weights) -> Experience:
        carts, moves = self._carts, []
        seen = [carts.state]
        with torch.no_grad():
            for _ in range(MOVES):
                scores, _ = functional_call(self._policy, weights, (carts.state,))
                pushed = carts.draw(scores.exp())
                chance = scores.gather(1, pushed[:, None]).squeeze(1)
                moves.append((pushed, chance, carts.push(pushed)))
                seen.append(carts.state)
        return Experience(torch.stack(seen), *map(torch.stack, zip(*moves, strict=True)))

    def play_and_keep(self, weights: Weights) -> Lazy[Experience]:
        """As `play`, but only a reference leaves: the learner fetches what is behind it."""
        return Lazy(rpc.RRef(self.play(weights)))


class Learner(nn.Module):
    """The policy, and the loss that betters it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()

    def forward(self, *rounds: Experience) -> Tensor:
        return torch.stack([self._loss(lived) for lived in rounds]).mean()

    def _loss(self, lived: Experience) -> Tensor:
        scores, values = self.policy(lived.seen)
        advantages = _advantages(values.detach(), lived.fell)
        aims = advantages + values[:-1].detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        chance = scores[:-1].gather(2, lived.pushed[..., None]).squeeze(2)
        ratio = (chance - lived.probability).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        entropy = -(scores.exp() * scores).sum(dim=-1).mean()
        error = (values[:-1] - aims).square().mean()
        loss: Tensor = -gain.mean() + 0.01 * error - 0.01 * entropy
        return loss


def _advantages(values: Tensor, fell: Tensor) -> Tensor:
    """How much better each move went than expected (GAE); a fall ends what could be earned."""
    goes_on = (~fell).float()
    ahead = torch.zeros(CARTS)
    advantages = []
    for move in reversed(range(MOVES)):
        surprise = 1.0 + DISCOUNT * values[move + 1] * goes_on[move] - values[move]
        ahead = surprise + DISCOUNT * SMOOTHING * goes_on[move] * ahead
        advantages.append(ahead)
    return torch.stack(advantages[::-1])


def weights_of(state: Weights) -> Weights:
    """What actors need of a learner's state, apart from what the learner goes on to change."""
    return {name.removeprefix("policy."): tensor.clone() for name, tensor in state.items()}


def balance(weights: Weights, seed: int) -> float:
    """How many moves a cart's pole stays up, on average, if the better push is always chosen."""
    carts, policy = CartPoles(32, seed), Policy()
    up, lasted = torch.ones(32, dtype=torch.bool), torch.zeros(32)
    with torch.no_grad():
        for _ in range(LONGEST):
            scores, _ = functional_call(policy, weights, (carts.state,))
            up &= ~carts.push(scores.argmax(dim=1))
            lasted += up
    return lasted.mean().item()


def train_job(actor_names: list[str], steps: int, seed: int) -> Outcome:
    learner = RemoteModule("learner", seeded, (seed, Learner))
    actors = [rpc.remote(name, Actor, args=(seed + n,)) for n, name in enumerate(actor_names, 1)]
    optimizer = DistributedOptimizer(torch.optim.Adam, learner, lr=RATE)

    def weights() -> Weights:
        return weights_of(learner.state_dict())

    playing = [actor.rpc_async().play_and_keep(weights()) for actor in actors]

    def step(_: int) -> float:
        nonlocal playing
        lived = [future.wait() for future in playing]
        current = weights()
        playing = [actor.rpc_async().play_and_keep(current) for actor in actors]
        with autograd.context() as context:
            loss = learner(*lived)
            autograd.backward(context, [loss])
            optimizer.step(context)
        return float(loss.item())

    def measure() -> float:
        for future in playing:
            future.wait()
        return balance(weights(), seed)

    return train(f"{len(actors)} actors", range(steps), step, measure)


def train_twin(count: int, steps: int, seed: int) -> Outcome:
    learner = seeded(seed, Learner)
    actors = [Actor(seed + n) for n in range(1, count + 1)]
    optimizer = torch.optim.Adam(learner.parameters(), lr=RATE)

    def weights() -> Weights:
        return weights_of(learner.state_dict())

    played = [actor.play(weights()) for actor in actors]

    def step(_: int) -> float:
        nonlocal played
        lived, played = played, [actor.play(weights()) for actor in actors]
        optimizer.zero_grad()
        loss: Tensor = learner(*lived)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train("one process", range(steps), step, lambda: balance(weights(), seed))


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("Actor-learner reinforcement learning.", steps=120, workers=2)
    chosen = parser.parse_args(argv)
    actors = names("actor", chosen.workers)
    job = telegrad.run(
        lambda: train_job(actors, chosen.steps, chosen.seed), workers=["learner", *actors]
    )
    twin = train_twin(len(actors), chosen.steps, chosen.seed)
    return show("moves in balance", job, twin)


if __name__ == "__main__":
    sys.exit(main())
