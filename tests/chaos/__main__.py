"""`make chaos`: train over real processes that are killed, stopped, cut off and delayed.

Every step must end right, as one process computes it, or with a named error before its deadline;
and when all is over nothing may be left. The same seed draws the same faults for the same steps;
when they strike is up to the machine.

    python -m tests.chaos --steps 500 --seed 7
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import telegrad
from telegrad import rpc
from tests.chaos import faults, program, spread

WORKERS = ["w1", "w2", "w3"]
DEADLINE = 20.0
# What a loss may take beyond the deadline of the calls that it ends: a busy machine.
GRACE = 10.0
CUTS, DELAYS = 0.003, 0.01


@dataclass
class Tally:
    """How the steps ended."""

    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


def run(steps: int, seed: int, liveness: float, seconds: float) -> Tally:
    tally = Tally()
    before = set(_left_in_this_process())

    def main() -> None:
        _train(tally, steps, seed, liveness, seconds)

    telegrad.run(main, workers=WORKERS, restarts=10 * steps, liveness=liveness)
    tally.leaks += sorted(set(_left_in_this_process()) - before)
    return tally


def _train(tally: Tally, steps: int, seed: int, liveness: float, seconds: float) -> None:
    numbers = random.Random(seed)
    striker = faults.Striker()
    until = time.monotonic() + seconds
    faults.be_clumsy(seed, CUTS, DELAYS)
    for step in range(steps):
        if time.monotonic() > until:
            break
        _prepare(striker, seed * 10_000 + step)
        fault = faults.draw(numbers, WORKERS, liveness)
        striking = striker.begin(fault)
        began = time.monotonic()
        _one_step(tally, seed, step, fault)
        tally.slowest = max(tally.slowest, time.monotonic() - began)
        striking.join()
    tally.struck += striker.struck
    _prepare(striker, 0)
    tally.struck += Counter(faults.be_careful())
    for name in WORKERS:
        tally.struck += Counter(rpc.rpc_sync(name, faults.be_careful))
    for name in ("main", *WORKERS):
        left = rpc.rpc_sync(name, program.leftovers, timeout=60)
        tally.leaks += [f"{name} still has {count} {what}" for what, count in left.items()]


def _prepare(striker: faults.Striker, seed: int) -> None:
    """All workers are there, and clumsy; those that were lost have been started anew."""
    for number, name in enumerate(WORKERS):
        while True:
            try:
                rpc.wait_for_worker(name, timeout=60)
                pid = rpc.rpc_sync(name, os.getpid, timeout=DEADLINE)
                if striker.pids.get(name) != pid:
                    args = (seed * 10 + number, CUTS, DELAYS)
                    rpc.rpc_sync(name, faults.be_clumsy, args=args, timeout=DEADLINE)
                    striker.pids[name] = pid
            except rpc.WorkerLost:
                continue
            break


def _one_step(tally: Tally, seed: int, step: int, fault: faults.Fault) -> None:
    given = program.inputs(seed, step, len(WORKERS))
    began = time.monotonic()
    try:
        found = program.distributed(given, WORKERS, DEADLINE)
        ok = program.agree(found, program.in_one_process(given))
        ok = ok and program.pass_reference_around(WORKERS, step, DEADLINE)
        if ok:
            tally.right += 1
        else:
            tally.wrong.append(f"step {step} with {fault} gave a wrong answer")
    except rpc.TelegradError as error:
        tally.errors[type(error).__name__] += 1
        if not any(name in str(error) for name in WORKERS):
            tally.wrong.append(f"step {step} with {fault}: names no worker: {error!r}")
    except Exception as error:
        tally.wrong.append(f"step {step} with {fault}: no error of telegrad's: {error!r}")
    if time.monotonic() - began > DEADLINE + GRACE:
        tally.wrong.append(f"step {step} with {fault} took {time.monotonic() - began:.1f} s")


def _left_in_this_process() -> list[str]:
    """Processes, sockets and shared memory that the job left behind."""
    left = [f"process {pid}" for pid in _children()]
    left += [f"directory {path}" for path in Path(os.environ["XDG_RUNTIME_DIR"]).glob("telegrad-*")]
    segments = program.usage()["segments"]
    return left + ([f"{segments} segments of shared memory"] if segments else [])


def _children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += (task / "children").read_text().split()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=secrets.randbits(24))
    parser.add_argument("--liveness", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=1800.0, help="begin no step after these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        print(f"seed {options.seed}, {options.steps} steps", flush=True)
        began = time.monotonic()
        tally = run(options.steps, options.seed, options.liveness, options.seconds)
    ended = tally.right + sum(tally.errors.values()) + len(tally.wrong)
    print(f"{ended} steps in {time.monotonic() - began:.0f} s, the slowest {tally.slowest:.1f} s")
    print(f"faults: {dict(tally.struck)}")
    print(f"right: {tally.right}; named errors: {dict(tally.errors)}; wrong: {len(tally.wrong)}")
    for line in (*tally.wrong, *(f"left behind: {leak}" for leak in tally.leaks)):
        print(line)
    spread_wrong = _on_hosts(max(1, options.steps // 5), options.seed)
    return 1 if tally.wrong or tally.leaks or spread_wrong else 0


def _on_hosts(steps: int, seed: int) -> bool:
    found = spread.run(steps, seed)
    print(f"on three hosts: {found.right} steps right while cables were pulled {found.pulls} times")
    if found.last:
        print(
            f"a cable that stayed out was noticed after {found.noticed_after:.1f} s: {found.last}"
        )
    if found.skipped:
        print(f"skipped: {found.skipped}")
    for line in found.wrong:
        print(line)
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())
