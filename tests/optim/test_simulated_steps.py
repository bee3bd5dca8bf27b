"""Backward and step in one in the simulator: any order of messages, a bad network, deaths."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer, StepFailed
from telegrad.rpc.errors import TelegradError
from telegrad.testing import Faults, WorkerKilled, simulate, worker_globals

NAMES = ("ann", "bob", "cid", "dan")
STEPS = 4


def made(worker: str) -> Tensor:
    return torch.full((3,), 1.0 + NAMES.index(worker), dtype=torch.float64, requires_grad=True)


def place_weight() -> rpc.RRef[Tensor]:
    """On its worker, which knows it from then on."""
    weight = worker_globals()["weight"] = made(rpc.get_worker_info().name)
    return rpc.RRef(weight)


def weigh(x: Tensor, route: tuple[str, ...]) -> Tensor:
    """Here, and then along the route; the result comes back the same way."""
    x = torch.sin(x * worker_globals()["weight"])
    if route:
        x = rpc.rpc_sync(route[0], weigh, (x, route[1:]))
    result: Tensor = x * worker_globals()["weight"]
    return result


def read_weight() -> Tensor:
    weight: Tensor = worker_globals()["weight"]
    return weight.detach().clone()


def routes(seed: int) -> list[tuple[str, ...]]:
    """Where each step goes; some workers have no part in it, and some are met several times."""
    rng = random.Random(f"routes {seed}")
    return [tuple(rng.choices(NAMES, k=rng.randint(1, 5))) for _ in range(STEPS)]


def rate(step: int) -> float:
    return (0.1, 0.05, 0.1, 0.2)[step % 4]


def train(seed: int) -> dict[str, Tensor]:
    weights = [rpc.rpc_sync(name, place_weight) for name in NAMES]
    optimizer = DistributedOptimizer(optim.SGD, weights, lr=0.1, momentum=0.9)
    for step, route in enumerate(routes(seed)):
        optimizer.param_groups[0]["lr"] = rate(step)
        with autograd.context() as context_id:
            x = torch.ones(3, dtype=torch.float64)
            loss = rpc.rpc_sync(route[0], weigh, (x, route[1:])).sum()
            optimizer.backward_and_step(context_id, [loss])
    return {name: rpc.rpc_sync(name, read_weight) for name in NAMES}


def train_in_one_process(seed: int) -> dict[str, Tensor]:
    weights = {name: made(name) for name in NAMES}
    optimizer = optim.SGD(weights.values(), lr=0.1, momentum=0.9)

    def weigh_along(x: Tensor, route: tuple[str, ...]) -> Tensor:
        x = torch.sin(x * weights[route[0]])
        if route[1:]:
            x = weigh_along(x, route[1:])
        return x * weights[route[0]]

    for step, route in enumerate(routes(seed)):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        weigh_along(torch.ones(3, dtype=torch.float64), route).sum().backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def check(seed: int, found: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, train_in_one_process(seed), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_those_of_one_process_in_any_order_of_messages(seed: int) -> None:
    result = simulate(partial(train, seed), NAMES, seed=seed, timeout=0)
    assert not result.leaks
    check(seed, result.values[NAMES[0]])


@pytest.mark.parametrize("seed", range(40))
def test_a_bad_network_and_deaths_end_in_the_same_steps_or_a_named_error(seed: int) -> None:
    rng = random.Random(f"faults {seed}")
    faults = Faults(
        drop=rng.choice((0.0, 0.02, 0.2)),
        duplicate=rng.choice((0.0, 0.2)),
        reorder=rng.choice((0.0, 0.5)),
        delay=rng.choice((0.0, 0.05)),
    )
    if seed % 2:
        faults = faults.kill(rng.choice(NAMES), during="backward", nth=rng.randint(1, 20))
    result = simulate(
        partial(train, seed), NAMES, seed=seed, faults=faults, allow=TelegradError, timeout=0
    )
    assert not result.leaks
    dead = [event.worker for event in result.trace if event.what == "dies"]
    error: Any = result.errors.get(NAMES[0])
    if error is None:
        check(seed, result.values[NAMES[0]])
    elif not isinstance(error, WorkerKilled):
        assert dead
        assert any(repr(name) in str(error) for name in dead), error
        if isinstance(error, StepFailed):
            assert error.stepped is None
