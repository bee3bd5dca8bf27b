"""Random programs of calls and references, under losses and kills, on the simulator.

A program is a tree of steps drawn from a seed. Every step is carried out on some worker; it makes
calls of each kind, passes references around, keeps some on its worker and drops others. Whatever
the network does, each call has to end with its result or with a named error before its deadline,
and when the kept references are gone nothing may be left on any survivor.
"""

from __future__ import annotations

import random

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.functions import async_execution
from telegrad.testing import Faults, WorkerKilled, now, seeds, simulate, sleep, worker_globals

WORKERS = ("a", "b", "c", "d")
TIMEOUT = 30.0
LONG = 1000.0
NAMED = (rpc.WorkerLost, rpc.CallTimeout, rpc.ReferenceLost, RuntimeError)
KINDS = ("sync", "async", "remote", "continued", "coroutine", "keep", "pass on", "fetch", "drop")


def draw_program(draw: random.Random, depth: int) -> list:
    """A list of steps: (kind, worker, steps to carry out there, number)."""
    steps = []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(KINDS)
        inner = draw_program(draw, depth - 1) if depth and draw.random() < 0.7 else []
        steps.append((kind, draw.choice(WORKERS), inner, draw.randrange(100)))
    return steps


def carry_out(steps: list, references: list) -> int:
    """Carry out steps on this worker; the sum of their numbers, those on other workers included."""
    return sum(carry_out_one(step, references) for step in steps)


@async_execution
def carry_out_continued(steps: list, references: list, via: str) -> torch.futures.Future:
    future = rpc.rpc_async(via, carry_out, args=(steps, references))
    return future.then(lambda done: done.wait() + 0)


async def carry_out_awaited(steps: list, references: list, via: str) -> int:
    return await rpc.rpc_async(via, carry_out, args=(steps, references))


def carry_out_one(step: tuple, references: list) -> int:
    kind, to, inner, number = step
    own = worker_globals().setdefault("kept", [])
    match kind:
        case "sync":
            return rpc.rpc_sync(to, carry_out, args=(inner, references)) + number
        case "async":
            first = rpc.rpc_async(to, carry_out, args=(inner, references))
            second = rpc.rpc_async(WORKERS[number % 4], torch.add, args=(torch.ones(2), number))
            assert second.wait().tolist() == [number + 1.0] * 2
            return first.wait() + number
        case "remote":
            rref = rpc.remote(to, carry_out, args=(inner, references))
            value = rref.to_here()
            own.append(rref)
            return value + number
        case "continued":
            args = (inner, references, WORKERS[number % 4])
            return rpc.rpc_sync(to, carry_out_continued, args=args) + number
        case "coroutine":
            args = (inner, references, WORKERS[number % 4])
            return rpc.rpc_sync(to, carry_out_awaited, args=args) + number
        case "keep":
            own.extend(references)
            own.append(rpc.RRef(torch.full((2,), float(number))))
            return rpc.rpc_sync(to, carry_out, args=(inner, own[-2:])) + number
        case "pass on":
            made = rpc.remote(to, torch.full, args=((2,), float(number)))
            other = WORKERS[number % 4]
            return rpc.rpc_sync(other, carry_out, args=(inner, [made, *references])) + number
        case "fetch":
            for rref in references:
                assert check(rref.to_here())
            return carry_out(inner, references) + number
        case _:
            own.clear()
            return carry_out(inner, references) + number


def check(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, torch.Tensor) and value.shape == (2,))


def expected(steps: list) -> int:
    return sum(number + expected(inner) for _, _, inner, number in steps)


def run_and_drop(program: list) -> tuple[int, float]:
    try:
        return carry_out(program, []), now()
    finally:
        drop_in_the_end()


def drop_in_the_end() -> None:
    """Functions whose callers gave up may still keep references: wait until they are through."""
    sleep(LONG)
    worker_globals().clear()


def is_named(error: BaseException) -> bool:
    """A worker that is gone, a time that is up; torch makes such an error in a `then` a text."""
    return any(name.__name__ in f"{type(error).__name__}: {error}" for name in NAMED[:3])


def program_of(seed: int) -> list:
    return draw_program(random.Random(seed), 3)


def run(seed: int, faults: Faults):
    program = program_of(seed)
    result = simulate(
        {"a": lambda: run_and_drop(program), **dict.fromkeys(WORKERS[1:], drop_in_the_end)},
        WORKERS,
        seed=seed,
        faults=faults,
        allow=NAMED,
        timeout=TIMEOUT,
        deadline=10 * LONG,
    )
    if result.error is not None and not isinstance(result.error, WorkerKilled):
        assert is_named(result.error), seed
    return result


def test_every_call_gives_its_result_whatever_the_order():
    for seed in seeds(150):
        result = run(seed, Faults())
        assert result.value[0] == expected(program_of(seed)), seed
        assert result.leaks == {}, seed


def test_every_call_gives_its_result_on_a_bad_network():
    for seed in seeds(100):
        result = run(seed, Faults(drop=0.1, duplicate=0.1, reorder=0.2, delay=0.01))
        assert result.value[0] == expected(program_of(seed)), seed
        assert result.leaks == {}, seed


@pytest.mark.parametrize("kills", [1, 2])
def test_with_kills_calls_end_by_result_or_name_and_leave_nothing(kills):
    for seed in seeds(150):
        draw = random.Random(seed)
        faults = Faults(drop=draw.choice((0.0, 0.1)), delay=draw.choice((0.0, 0.05)))
        for _ in range(kills):
            faults = faults.kill(draw.choice(WORKERS), at=int(10 ** draw.uniform(0, 2.5)))
        result = run(seed, faults)
        if result.error is None:
            assert result.value[0] == expected(program_of(seed)), seed
        assert result.leaks == {}, seed


def test_with_cuts_calls_end_by_result_or_name_and_leave_nothing():
    for seed in seeds(100):
        draw = random.Random(seed)
        one, other = draw.sample(WORKERS, 2)
        lasting = draw.choice((0.5, 3.0, None))
        faults = Faults(drop=0.05).cut(one, other, at=draw.randint(1, 60), lasting=lasting)
        result = run(seed, faults)
        if lasting is not None:
            assert result.error is None, seed
        assert result.leaks == {}, seed
