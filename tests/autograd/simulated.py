"""Random programs in the simulator: any order of messages, a bad network, workers that die.

Some seeds run a second program at the same time, conducted by another worker in its own context.

Calls have no time limit here, so that nothing that hangs can pass for a timeout: a run in which
somebody waits for ever fails with `SimulationFailed`, which says who waits for what.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from telegrad.autograd.messages import Mode
from telegrad.rpc.errors import CallTimeout, TelegradError
from telegrad.testing import Faults, Result, WorkerKilled, simulate
from tests.autograd.comparison import Expectation, Mismatch, Skip, expectation, judge
from tests.autograd.conducted import compare, conduct
from tests.autograd.machine import Boom

NAMES = ("ann", "bob", "cid", "dan")
COMPANION = 10_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Performance:
    """One program and the workers that play it; the first of them conducts."""

    expected: Expectation
    seed: int
    features: frozenset[str]
    names: tuple[str, ...]
    mode: Mode

    def __call__(self) -> list[dict[str, Any]]:
        return conduct(self.expected, self.seed, self.features, self.names, self.mode)

    def outcome(self, result: Result, dead: list[str]) -> str:
        error = result.errors.get(self.names[0])
        if error is None:
            compare(self.expected, result.values[self.names[0]], self.features)
            return "equal"
        if isinstance(error, WorkerKilled):
            return "the one who conducts was killed"
        if _names_a_loss(error, dead):
            return "named a worker that was killed"
        assert isinstance(error, Exception)
        return judge(error, self.expected.error, self.mode)


def compare_simulated(
    seed: int, features: frozenset[str], mode: Mode = Mode.SMART, *, with_faults: bool = False
) -> str:
    """Run one program in the simulator and compare it with one process."""
    performances = _cast(seed, features, mode)
    names = NAMES[: max(len(p.names) for p in performances)]
    steps = sum(len(p.expected.program.steps) for p in performances)
    result = simulate(
        {p.names[0]: p for p in performances},
        names,
        seed=seed,
        faults=_draw_faults(seed, names, steps) if with_faults else Faults(),
        allow=(TelegradError, Boom),
        timeout=0,
    )
    if result.leaks:
        raise Mismatch(f"left on the survivors: {result.leaks}")
    dead = [event.worker for event in result.trace if event.what == "dies"]
    outcome, *_ = [performance.outcome(result, dead) for performance in performances]
    return outcome


def _cast(seed: int, features: frozenset[str], mode: Mode) -> list[Performance]:
    expected = expectation(seed, features)
    first = Performance(expected, seed, features, NAMES[: expected.program.workers], mode)
    if random.Random(f"companion {seed}").random() < 0.75:
        return [first]
    try:
        other = expectation(seed + COMPANION, features)
    except Skip:
        return [first]
    count = max(expected.program.workers, other.program.workers)
    names = NAMES[:count][::-1][: other.program.workers]
    second = Performance(other, seed + COMPANION, features, names, mode)
    return [first] if names[0] == first.names[0] else [first, second]


def _draw_faults(seed: int, names: tuple[str, ...], steps: int) -> Faults:
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
        victim = rng.choice(names)
        if rng.random() < 0.5:
            faults = faults.kill(victim, during="backward", nth=rng.randint(1, 12))
        else:
            faults = faults.kill(victim, at=rng.randint(1, 4 * steps))
    if len(names) > 1 and rng.random() < 0.1:
        one, other = rng.sample(names, 2)
        faults = faults.cut(one, other, at=rng.randint(1, 4 * steps), lasting=rng.uniform(0, 4))
    return faults


def _names_a_loss(error: BaseException, dead: list[str]) -> bool:
    return not isinstance(error, CallTimeout) and any(
        f"{name!r}" in str(error) or f"worker {NAMES.index(name)}" in str(error).lower()
        for name in dead
    )
