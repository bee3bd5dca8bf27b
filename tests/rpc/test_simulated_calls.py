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
from telegrad.rpc.errors import LostWithWorker
from telegrad.rpc.functions import async_execution
from telegrad.testing import (
    Faults,
    Result,
    WorkerKilled,
    now,
    seeds,
    simulate,
    sleep,
    worker_globals,
)

WORKERS = ("a", "b", "c", "d")
TIMEOUT = 30.0
LONG = 1000.0
NAMED = (rpc.WorkerLost, rpc.CallTimeout, rpc.ReferenceLost, RuntimeError)
KINDS = ("sync", "async", "remote", "continued", "coroutine", "keep", "pass on", "fetch", "drop")


def draw_program(draw: random.Random, depth: int = 3) -> list:
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
    names = [*(kind.__name__ for kind in NAMED[:3]), LostWithWorker.__name__]
    return any(name in f"{type(error).__name__}: {error}" for name in names)


def run(seed: int, faults: Faults) -> Result:
    """Run the program of a seed; what it returns, if it does, is right."""
    program = draw_program(random.Random(seed))
    result = simulate(
        {"a": lambda: run_and_drop(program), **dict.fromkeys(WORKERS[1:], drop_in_the_end)},
        WORKERS,
        seed=seed,
        faults=faults,
        allow=NAMED,
        timeout=TIMEOUT,
        deadline=10 * LONG,
    )
    if result.error is None:
        assert result.value[0] == expected(program), seed
    elif not isinstance(result.error, WorkerKilled):
        assert is_named(result.error), seed
    return result


def test_every_call_gives_its_result_whatever_the_order():
    for seed in seeds(150):
        result = run(seed, Faults())
        assert result.error is None, seed
        assert result.leaks == {}, seed


def test_every_call_gives_its_result_on_a_bad_network():
    for seed in seeds(100):
        result = run(seed, Faults(drop=0.1, duplicate=0.1, reorder=0.2, delay=0.01))
        assert result.error is None, seed
        assert result.leaks == {}, seed


def faults_with_kills(seed: int, kills: int) -> Faults:
    draw = random.Random(seed)
    faults = Faults(drop=draw.choice((0.0, 0.1)), delay=draw.choice((0.0, 0.05)))
    for _ in range(kills):
        faults = faults.kill(draw.choice(WORKERS), at=int(10 ** draw.uniform(0, 2.5)))
    return faults


@pytest.mark.parametrize("kills", [1, 2])
def test_with_kills_calls_end_by_result_or_by_name_and_nothing_is_left(kills):
    for seed in seeds(150):
        result = run(seed, faults_with_kills(seed, kills))
        assert result.leaks == {}, seed


def test_a_connection_that_breaks_and_mends_is_not_noticed():
    for seed in seeds(100):
        draw = random.Random(seed)
        one, other = draw.sample(WORKERS, 2)
        lasting = draw.uniform(0.0, 4.0)
        faults = Faults(drop=0.05).cut(one, other, at=draw.randint(1, 60), lasting=lasting)
        result = run(seed, faults)
        assert result.error is None, seed
        assert result.leaks == {}, seed


def test_two_workers_that_lose_each_other_fail_calls_by_name():
    for seed in seeds(50):
        draw = random.Random(seed)
        one, other = draw.sample(WORKERS, 2)
        run(seed, Faults(drop=0.05).cut(one, other, at=draw.randint(1, 60)))


# What keeps an error must not keep those who saw it.


def fail() -> None:
    raise KeyError("no such thing")


def ask_for_failed_value() -> None:
    rref = rpc.remote("a", fail)
    with pytest.raises(KeyError, match="no such thing"):
        rref.to_here()


def test_a_value_that_failed_goes_with_its_reference_although_its_owner_saw_the_error():
    for seed in seeds(10):
        assert simulate(ask_for_failed_value, seed=seed).leaks == {}


def ask_for_lost_value() -> None:
    rref = rpc.remote("b", torch.ones, args=(2,))
    rref.to_here()
    sleep(3.0)
    with pytest.raises(rpc.ReferenceLost):
        rref.to_here()


def test_a_lost_reference_goes_although_someone_saw_that_it_was_lost():
    for seed in seeds(10):
        result = simulate(ask_for_lost_value, seed=seed, faults=Faults().kill("b", after=1.0))
        assert result.error is None
        assert result.leaks == {}


def ask_for_failed_future() -> None:
    rref = rpc.RRef(1)
    future = rpc.rpc_async("b", fail)
    with pytest.raises(KeyError):
        future.wait()
    assert rref.local_value() == 1


def test_a_future_that_failed_does_not_keep_the_frames_of_those_who_waited():
    for seed in seeds(10):
        assert simulate(ask_for_failed_future, seed=seed).leaks == {}
