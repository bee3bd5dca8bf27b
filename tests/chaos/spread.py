"""The part of `make chaos` in network namespaces: one host per worker, whose cables are pulled.

A cable that is back before the liveness window ends may cost time and nothing else: every step has
to be right. One that stays out ends the steps that need its host, with an error that names it.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from telegrad import rpc
from tests.chaos import program
from tests.netns import hosts, why_not
from tests.rpc.fleet import Nursery
from tests.rpc.spread import SpreadJob

LIVENESS = 4.0
DEADLINE = 30.0
DEGRADED = ("delay", "5ms", "3ms", "loss", "1%")


@dataclass
class Spread:
    """How it went; `skipped` says what this machine does not permit."""

    right: int = 0
    pulls: int = 0
    last: str = ""
    noticed_after: float = 0.0
    skipped: str = ""
    wrong: list[str] = field(default_factory=list)


def steps_here(seed: int, steps: int) -> list[str]:
    """What went wrong in so many steps over all workers, driven from this one."""
    names = [info.name for info in rpc.get_worker_infos() if info != rpc.get_worker_info()]
    wrong = []
    for step in range(steps):
        given = program.inputs(seed, step, len(names))
        try:
            found = program.distributed(given, names, DEADLINE)
            if not program.agree(found, program.in_one_process(given)):
                wrong.append(f"step {step} gave a wrong answer")
        except Exception as error:
            wrong.append(f"step {step}: {error!r}")
    return wrong


def step_until_error(seed: int) -> tuple[str, float]:
    """Go on until a step fails; its error, and when it came."""
    names = [info.name for info in rpc.get_worker_infos() if info != rpc.get_worker_info()]
    until = time.monotonic() + DEADLINE
    for step in range(1_000_000):
        try:
            program.distributed(program.inputs(seed, step, len(names)), names, DEADLINE)
        except rpc.TelegradError as error:
            return f"{type(error).__name__}: {error}", time.monotonic()
        if time.monotonic() > until:
            break
    raise AssertionError("no step failed")


def run(steps: int, seed: int) -> Spread:
    reason = why_not()
    if reason is not None:
        return Spread(skipped=reason)
    nursery = Nursery()
    try:
        with hosts("a", "b", "c") as network:
            return _run(nursery, network, steps, seed)
    finally:
        nursery.close()


def _run(nursery: Nursery, network: object, steps: int, seed: int) -> Spread:
    job = SpreadJob(nursery, network, liveness=LIVENESS)  # type: ignore[arg-type]
    spread = Spread()
    refused = [job.network.degrade(name, *DEGRADED) for name in "abc"]
    spread.skipped = f"loss and latency ({refused[0]})" if refused[0] else ""
    over = threading.Event()
    pulling = threading.Thread(target=_pull_cables, args=(job, spread, over, seed))
    pulling.start()
    try:
        spread.wrong = job["a"].begin(steps_here, seed, steps).result(steps * DEADLINE)
        spread.right = steps - len(spread.wrong)
    finally:
        over.set()
        pulling.join()
    time.sleep(LIVENESS)
    failing = job["a"].begin(step_until_error, seed)
    job.network.cut_off("c")
    began = time.monotonic()
    spread.last, ended = failing.result(2 * DEADLINE)
    spread.noticed_after = ended - began
    if "'c'" not in spread.last or spread.noticed_after > LIVENESS + 4.0:
        spread.wrong.append(f"{spread.last} after {spread.noticed_after:.1f} s")
    for process in job.processes.values():
        process.kill()
    return spread


def _pull_cables(job: SpreadJob, spread: Spread, over: threading.Event, seed: int) -> None:
    numbers = random.Random(seed)
    while not over.wait(numbers.uniform(0.2, 1.0)):
        name = numbers.choice("abc")
        job.network.cut_off(name)
        time.sleep(numbers.uniform(0.02, LIVENESS / 4))
        job.network.join(name)
        spread.pulls += 1
        over.wait(LIVENESS / 4)
