"""Random programs in the simulator: any order of messages, a bad network, workers that die.

Calls have no time limit here, so that nothing that hangs can pass for a timeout: a run in which
somebody waits for ever fails with `SimulationFailed`, which says who waits for what.
"""

from __future__ import annotations

import random

from telegrad.autograd.messages import Mode
from telegrad.rpc.errors import CallTimeout, TelegradError
from telegrad.testing import Faults, Result, WorkerKilled, simulate
from tests.autograd.comparison import Expectation, Mismatch, expectation, judge
from tests.autograd.conducted import compare, conduct
from tests.autograd.machine import Boom

NAMES = ("ann", "bob", "cid", "dan")


def draw_faults(seed: int, workers: int, steps: int) -> Faults:
    """A bad network for most seeds, the death of a worker or two for most seeds."""
    rng = random.Random(f"faults {seed}")
    faults = Faults()
    if rng.random() < 0.7:
        faults = Faults(
            drop=rng.choice((0.0, 0.02, 0.2)),
            duplicate=rng.choice((0.0, 0.02, 0.2)),
            reorder=rng.choice((0.0, 0.1, 0.5)),
            delay=rng.choice((0.0, 0.0, 0.05, 0.5)),
        )
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        victim = rng.choice(NAMES[:workers])
        if rng.random() < 0.5:
            faults = faults.kill(victim, during="backward", nth=rng.randint(1, 12))
        else:
            faults = faults.kill(victim, at=rng.randint(1, 4 * steps))
    return faults


def compare_simulated(
    seed: int,
    features: frozenset[str],
    mode: Mode = Mode.SMART,
    *,
    with_faults: bool = False,
) -> str:
    """Run one program in the simulator and compare it with one process."""
    expected = expectation(seed, features)
    program = expected.program
    names = NAMES[: program.workers]
    faults = draw_faults(seed, len(names), len(program.steps)) if with_faults else Faults()
    result = simulate(
        lambda: conduct(expected, seed, features, names, mode),
        names,
        seed=seed,
        faults=faults,
        allow=(TelegradError, Boom),
        timeout=0,
    )
    if result.leaks:
        raise Mismatch(f"left on the survivors: {result.leaks}")
    return _outcome(result, expected, features, mode)


def _outcome(result: Result, expected: Expectation, features: frozenset[str], mode: Mode) -> str:
    error = result.error
    if error is None:
        compare(expected, result.value, features)
        return "equal"
    if isinstance(error, WorkerKilled):
        return "the one who conducts was killed"
    dead = [event.worker for event in result.trace if event.what == "dies"]
    if dead and _names_a_loss(error, dead):
        return "named a worker that was killed"
    assert isinstance(error, Exception)
    return judge(error, expected.error, mode)


def _names_a_loss(error: BaseException, dead: list[str]) -> bool:
    return not isinstance(error, CallTimeout) and any(
        f"{name!r}" in str(error) or f"worker {NAMES.index(name)}" in str(error).lower()
        for name in dead
    )
