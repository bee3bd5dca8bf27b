"""Random programs on workers that call each other: each value lives on the worker of its step.

One worker conducts. It has the steps done where they belong, and whoever does a step may have those
that follow done by further calls instead of returning: so calls nest and come back to workers that
still wait. How the tensors of a crossing travel (pushed, pulled, by reference, over a third worker,
to a coroutine) is drawn from the seed. Workers are processes or simulated; nothing here knows.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import api
from telegrad.autograd.messages import Mode
from telegrad.testing import worker_globals
from tests.autograd.comparison import (
    Expectation,
    Mismatch,
    compare_gradient,
    compare_hooks,
    compare_retained,
    tolerance_of,
)
from tests.autograd.machine import Machine, OneProcess, plain
from tests.autograd.program import Cross, Program, Step, write_program


class Way(Enum):
    """How tensors get from the worker that has them to the one that wants them."""

    PUSH = auto()
    PUSH_AND_WAIT = auto()
    PUSH_TO_COROUTINE = auto()
    CREATE = auto()
    PULL = auto()
    PULL_BY_REFERENCE = auto()
    SEND_REFERENCE = auto()
    OVER_THIRD = auto()
    REFERENCE_OVER_THIRD = auto()


TO_ONESELF = (Way.PUSH, Way.PUSH_AND_WAIT, Way.PUSH_TO_COROUTINE, Way.CREATE)
"""A reference gives its owner the value itself and not a copy: those ways are no crossing."""


@dataclass(frozen=True, slots=True)
class Score:
    """A program, and all that is left open by it: who calls whom, and how tensors travel."""

    program: Program
    names: tuple[str, ...]
    ways: tuple[Way, ...]
    """For each step, though only crossings need one."""
    nests: tuple[bool, ...]
    """Whether a step that belongs to another worker is called from here, or by one's caller."""
    thirds: tuple[str, ...]
    by_reference: bool
    """Whether backward is asked for by `RRef.backward`."""


def write_score(seed: int, features: frozenset[str], names: tuple[str, ...]) -> Score:
    program = write_program(seed, features)
    rng = random.Random(f"score {seed}")
    names = names[: program.workers]
    return Score(
        program,
        names,
        tuple(_draw_way(rng, step) for step in program.steps),
        tuple(rng.random() < 0.5 for _ in program.steps),
        tuple(rng.choice(names) for _ in program.steps),
        rng.random() < 0.3,
    )


def _draw_way(rng: random.Random, step: Step) -> Way:
    if not isinstance(step, Cross) or step.worker == step.target:
        return rng.choice(TO_ONESELF)
    return rng.choice(tuple(Way))


@dataclass(frozen=True, slots=True, eq=False)
class _Player:
    score: Score
    machine: Machine


def _player(seed: int) -> _Player:
    player: _Player = worker_globals()["players"][seed]
    return player


# On the workers.


def prepare(seed: int, features: str, names: tuple[str, ...]) -> None:
    score = write_score(seed, frozenset(features.split(",")) - {""}, names)
    player = _Player(score, Machine(score.program, seed))
    worker_globals().setdefault("players", {})[seed] = player


def play(seed: int, first: int) -> int:
    """Do the steps from `first` on that belong here; gives the first that the caller must do."""
    player, here = _player(seed), rpc.get_worker_info().name
    score, k = player.score, first
    while k < len(score.program.steps):
        step = score.program.steps[k]
        there = score.names[step.worker]
        if there == here:
            _do(seed, player, k, step)
            k += 1
        elif score.nests[k]:
            k = rpc.rpc_sync(there, play, args=(seed, k))
        else:
            return k
    return k


def _do(seed: int, player: _Player, k: int, step: Step) -> None:
    if not isinstance(step, Cross):
        player.machine.do(step, OneProcess())
        return
    tensors = [player.machine.values[i] for i in step.values]
    to = player.score.names[step.target]
    if step.late:
        rpc.rpc_async(to, receive, args=(seed, (), tensors))
    else:
        _cross(seed, player.score, k, step, to, tensors)


def _cross(seed: int, score: Score, k: int, step: Cross, to: str, tensors: list[Tensor]) -> None:
    here, third, out = score.names[step.worker], score.thirds[k], step.out
    match score.ways[k]:
        case Way.PUSH:
            rpc.rpc_sync(to, receive, args=(seed, out, tensors))
        case Way.PUSH_AND_WAIT:
            rpc.rpc_async(to, receive, args=(seed, out, tensors)).wait()
        case Way.PUSH_TO_COROUTINE:
            rpc.rpc_sync(to, receive_later, args=(seed, out, tensors))
        case Way.CREATE:
            rpc.remote(to, receive, args=(seed, out, tensors)).to_here()
        case Way.PULL:
            rpc.rpc_sync(to, pull, args=(seed, out, here, step.values))
        case Way.PULL_BY_REFERENCE:
            rpc.rpc_sync(to, pull_by_reference, args=(seed, out, here, step.values))
        case Way.SEND_REFERENCE:
            rpc.rpc_sync(to, fetch, args=(seed, out, rpc.RRef(tensors)))
        case Way.OVER_THIRD:
            rpc.rpc_sync(third, hand_on, args=(to, receive, seed, out, tensors))
        case Way.REFERENCE_OVER_THIRD:
            rpc.rpc_sync(third, hand_on, args=(to, fetch, seed, out, rpc.RRef(tensors)))


def receive(seed: int, out: tuple[int, ...], tensors: list[Tensor]) -> None:
    if out:
        _player(seed).machine.values.update(zip(out, tensors, strict=True))


async def receive_later(seed: int, out: tuple[int, ...], tensors: list[Tensor]) -> None:
    await asyncio.sleep(0.001)
    receive(seed, out, tensors)


def give(seed: int, values: tuple[int, ...]) -> list[Tensor]:
    machine = _player(seed).machine
    return [machine.values[i] for i in values]


def pull(seed: int, out: tuple[int, ...], source: str, values: tuple[int, ...]) -> None:
    receive(seed, out, rpc.rpc_sync(source, give, args=(seed, values)))


def pull_by_reference(
    seed: int, out: tuple[int, ...], source: str, values: tuple[int, ...]
) -> None:
    receive(seed, out, rpc.remote(source, give, args=(seed, values)).to_here())


def fetch(seed: int, out: tuple[int, ...], rref: Any) -> None:
    receive(seed, out, rref.to_here())


def hand_on(to: str, function: Any, seed: int, out: tuple[int, ...], given: Any) -> None:
    rpc.rpc_sync(to, function, args=(seed, out, given))


def sum_of(seed: int, value: int) -> Tensor:
    return _player(seed).machine.values[value].sum()


def differentiate(
    context_id: int, seed: int, roots: tuple[int, ...], retain_graph: bool, mode: str
) -> None:
    tensors = [sum_of(seed, i) for i in roots]
    api.backward(context_id, tensors, retain_graph=retain_graph, mode=mode)


def collect(context_id: int, seed: int) -> dict[str, Any]:
    machine = _player(seed).machine
    gradients = api.get_gradients(context_id)
    return {
        "gradients": {
            i: plain(gradients[p]) for i, p in enumerate(machine.parameters) if p in gradients
        },
        "touched": [i for i, p in enumerate(machine.parameters) if p.grad is not None],
        "hook_calls": machine.hook_calls,
        "retained": {n: plain(v.grad) for n, v in machine.values.items() if not v.is_leaf},
    }


def forget(seed: int) -> None:
    worker_globals()["players"].pop(seed, None)


def leftovers() -> dict[str, int]:
    return api.autograd_of().counts()


# On the worker that conducts.


def conduct(
    expected: Expectation, seed: int, features: frozenset[str], names: tuple[str, ...], mode: Mode
) -> list[dict[str, Any]]:
    """Run a program to the end of its passes; what each worker has found."""
    score = write_score(seed, features, names)
    for name in score.names:
        rpc.rpc_sync(name, prepare, args=(seed, ",".join(sorted(features)), score.names))
    with api.context() as context_id:
        _play_all(seed, score)
        for i, (worker, roots) in enumerate(expected.passes):
            retain = i + 1 < len(expected.passes)
            if score.by_reference and len(roots) == 1 and mode is Mode.SMART:
                root = rpc.remote(score.names[worker], sum_of, args=(seed, roots[0]))
                root.backward(context_id, retain_graph=retain)
            else:
                arguments = (context_id, seed, roots, retain, mode.value)
                rpc.rpc_sync(score.names[worker], differentiate, args=arguments)
        with torch.no_grad():
            return [rpc.rpc_sync(n, collect, args=(context_id, seed)) for n in score.names]


def _play_all(seed: int, score: Score) -> None:
    k = 0
    while k < len(score.program.steps):
        k = rpc.rpc_sync(score.names[score.program.steps[k].worker], play, args=(seed, k))


def compare(expected: Expectation, found: list[dict[str, Any]], features: frozenset[str]) -> None:
    """Everything that the workers found against what one process found."""
    if expected.error is not None:
        raise Mismatch("one process fails, the workers did not")
    program, strict = expected.program, "undefined" not in features
    for i, parameter in enumerate(program.parameters):
        for worker, there in enumerate(found):
            if worker == parameter.worker:
                compare_gradient(expected, i, there["gradients"].get(i), strict)
            elif i in there["gradients"]:
                raise Mismatch(f"worker {worker} has a gradient of parameter {i}")
            if i in there["touched"]:
                raise Mismatch(f".grad of parameter {i} was touched")
    calls = [call for there in found for call in there["hook_calls"]]
    compare_hooks(expected.oracle.hook_calls, calls, tolerance_of(program), strict)
    retained = {n: g for there in found for n, g in there["retained"].items()}
    compare_retained(expected, retained, strict)
