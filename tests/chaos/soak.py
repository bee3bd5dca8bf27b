"""`make soak`: a million calls, a hundred thousand contexts, faults in between, and no growth.

Workers "steady" and "shaky" serve calls, references and backward passes. "shaky" is killed and
stopped at random and connections are cut; "steady" and main live from the first to the last moment,
so what they hold at the end is what the whole run left there.

    python -m tests.chaos.soak --calls 1000000 --contexts 100000 --seconds 3600
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

import telegrad
from telegrad import autograd, rpc
from tests.chaos import faults, program

STEADY, SHAKY = "steady", "shaky"
DEADLINE = 20.0
BATCH = 200
BRISK = {"none": 300, "kill": 3, "stop briefly": 3}
SAMPLES = 12
# Allocators and the pool of threads keep what was used once; nothing may grow with the calls.
MOST_GROWTH = {"threads": 64, "descriptors": 8, "segments": 2, "resident KB": 24_000}


@dataclass
class Soak:
    """What was asked for, what was done, and what it cost."""

    calls: int
    contexts: int
    seconds: float
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def share(self) -> float:
        return min(self.done["calls"] / self.calls, self.done["contexts"] / self.contexts)


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _work(soak: Soak) -> None:
    numbers = random.Random(soak.seed)
    striker = faults.Striker()
    until = time.monotonic() + soak.seconds
    per_round = max(1, round(BATCH * soak.contexts / soak.calls))
    next_sample = 0.02  # of the way: after everything has been used once
    while soak.share() < 1 and time.monotonic() < until:
        pid = _meet_shaky(soak, numbers)
        striker.pids[SHAKY] = pid
        striking = striker.begin(faults.draw(numbers, [SHAKY], 2.0, BRISK))
        _make_calls(soak)
        _make_contexts(soak, per_round)
        striking.join()
        progress = max(soak.share(), 1 - (until - time.monotonic()) / soak.seconds)
        if progress >= next_sample:
            _sample(soak, numbers)
            next_sample += 1 / SAMPLES
    soak.done += striker.struck
    _meet_shaky(soak, numbers)
    for name in ("main", STEADY, SHAKY):
        soak.done += Counter(rpc.rpc_sync(name, faults.be_careful, timeout=DEADLINE))
    _sample(soak, numbers)
    for name in ("main", STEADY, SHAKY):
        for what, count in rpc.rpc_sync(name, program.leftovers, timeout=60).items():
            soak.problems.append(f"{name} still has {count} {what}")


def _meet_shaky(soak: Soak, numbers: random.Random) -> int:
    while True:
        with contextlib.suppress(rpc.WorkerLost):
            rpc.wait_for_worker(SHAKY, timeout=60)
            seed = numbers.randrange(1 << 30)
            args = (seed, 0.0002, 0.0)
            return int(rpc.rpc_sync(SHAKY, faults.be_clumsy, args=args, timeout=DEADLINE))


def _make_calls(soak: Soak) -> None:
    futures = [
        rpc.rpc_async((STEADY, SHAKY)[n % 2], abs, args=(-n,), timeout=DEADLINE)
        for n in range(BATCH)
    ]
    for number, future in enumerate(futures):
        try:
            if future.wait() != number:
                soak.problems.append(f"abs(-{number}) was {future.wait()}")
        except rpc.TelegradError as error:
            soak.errors[type(error).__name__] += 1
    soak.done["calls"] += BATCH


def _make_contexts(soak: Soak, count: int) -> None:
    for number in range(count):
        x = torch.tensor([float(number), 1.0], requires_grad=True)
        try:
            kept = rpc.remote(STEADY, square, args=(x.detach(),), timeout=DEADLINE)
            with autograd.context() as context:
                first = rpc.rpc_sync(STEADY, square, args=(x,), timeout=DEADLINE)
                second = rpc.rpc_sync(SHAKY, square, args=(first,), timeout=DEADLINE)
                autograd.backward(context, [second.sum()])
                gradient = autograd.get_gradients(context)[x]
            if not torch.equal(gradient, 4 * x.detach() ** 3):
                soak.problems.append(f"a gradient was {gradient} for {x}")
            del kept
        except rpc.TelegradError as error:
            soak.errors[type(error).__name__] += 1
        soak.done["contexts"] += 1


def _acquaint() -> None:
    """Everyone has called everyone, so that samples differ by what stays and by nothing else."""
    for name in ("main", STEADY, SHAKY):
        for other in ("main", STEADY, SHAKY):
            call = (other, abs, (-1,), None, DEADLINE)
            rpc.rpc_sync(name, rpc.rpc_sync, args=call, timeout=DEADLINE)


def _sample(soak: Soak, numbers: random.Random) -> None:
    _meet_shaky(soak, numbers)
    _acquaint()
    for name in ("main", STEADY):
        used = rpc.rpc_sync(name, program.usage, timeout=DEADLINE)
        soak.samples.setdefault(name, []).append(used)
    print(f"{soak.share():5.0%} {dict(soak.done)} main {soak.samples['main'][-1]}", flush=True)


def judge(soak: Soak) -> None:
    """Compare what was held after a third of the way with the end: before, pools still fill."""
    for name, samples in soak.samples.items():
        early, last = samples[len(samples) // 3], samples[-1]
        for what, most in MOST_GROWTH.items():
            if last[what] - early[what] > most:
                grown = last[what] - early[what]
                soak.problems.append(f"{what} of {name} grew by {grown}: {early} to {last}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--contexts", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(24))
    options = parser.parse_args()
    soak = Soak(**vars(options))
    print(f"seed {soak.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        telegrad.run(lambda: _work(soak), workers=[STEADY, SHAKY], restarts=1_000_000, liveness=2.0)
    judge(soak)
    print(f"{time.monotonic() - began:.0f} s; {dict(soak.done)}; named errors {dict(soak.errors)}")
    for name, samples in soak.samples.items():
        print(f"{name}: {samples[len(samples) // 3]} -> {samples[-1]}")
    for problem in soak.problems:
        print(problem)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
