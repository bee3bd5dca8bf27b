"""A dry run of a large job: does anything grow with the square of the workers?

`python -m benchmarks.many` runs a whole job in one process, for 100 to 10,000 workers: they join,
call each other with a fan-out that does not depend on their number, differentiate through a tree of
all of them, hold references, and leave. The protocols are those of production. Links are simulated
(`telegrad.testing`), and so is the store in which workers find each other.

What is counted is counted per worker, but for what one worker does for all. The last column says
how the sum over all workers grows: as their number to that power. It is 1 for what is fair, and 2
for what must not be. A count whose power is too high fails the run.

Each size runs in a process of its own, so that its memory can be told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from benchmarks import pages
from telegrad import autograd, rpc
from telegrad.rpc import noticeboard, rendezvous
from telegrad.rpc.closing import Closing
from telegrad.rpc.current import current_node
from telegrad.rpc.node import register_layer
from telegrad.rpc.silence import Ask, Listening
from telegrad.testing import simulate
from telegrad.wire.keys import new_key

SIZES = (100, 1_000, 3_000, 10_000)
QUICK_SIZES = (100, 300, 1_000)
FAIR = 1.2
"""The highest power of the workers that passes for linear: there are logarithms, and noise."""
OF_ONE = ("rank 0", "most of any")
"""Figures of one worker, not of each."""
FAN_OUT = 10
CALLS_PER_WORKER = 4
READERS = 20
"""So many workers read the list of members for all: each reads the same."""

Figures = dict[str, float]


# Joining.


@dataclass
class Meter:
    """Counts what passes between workers and the store."""

    entries: dict[str, bytes] = field(default_factory=dict)
    operations: int = 0
    transferred: int = 0

    def reset(self) -> None:
        self.operations = self.transferred = 0


class NotThere(Exception):
    """An entry is missing, for which a worker would wait."""


class MeteredStore:
    """As torch's stores, in this process. An entry that is missing is not waited for."""

    def __init__(self, prefix: str, inside: MeteredStore | Meter) -> None:
        outer = inside if isinstance(inside, MeteredStore) else None
        self._prefix = f"{outer._prefix}/{prefix}" if outer else prefix
        self._meter: Meter = outer._meter if outer else inside  # type: ignore[assignment]

    def _count(self, key: str, value: bytes = b"") -> str:
        self._meter.operations += 1
        self._meter.transferred += len(key) + len(value)
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str) -> None:
        self._meter.entries[self._count(key, value.encode())] = value.encode()

    def get(self, key: str) -> bytes:
        value = self._meter.entries.get(f"{self._prefix}/{key}")
        if value is None:
            raise NotThere(key)
        self._count(key, value)
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        for key in keys:
            if self._count(key) not in self._meter.entries:
                raise NotThere(key)

    def add(self, key: str, amount: int) -> int:
        place = self._count(key)
        number = int(self._meter.entries.get(place, b"0")) + amount
        self._meter.entries[place] = str(number).encode()
        return number

    def check(self, keys: list[str]) -> bool:
        return all(self._count(key) in self._meter.entries for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        entries, place = self._meter.entries, self._count(key)
        if entries.get(place, b"").decode() == expected:
            entries[place] = desired.encode()
        return entries[place]


def join(size: int) -> Figures:
    """All write down who they are, rank 0 lists them, and some read the list for all."""
    meter, key = Meter(), new_key()
    rendezvous.PrefixStore = noticeboard.PrefixStore = MeteredStore  # type: ignore[misc]
    visits = {}
    for rank in range(size):
        visit = rendezvous.Rendezvous(meter, f"worker{rank}", rank, size, 1.0)  # type: ignore[arg-type]
        visits[rank] = visit, visit.prepare(key, None, True, ("tcp",))
    for rank in range(1, size):
        visit, meeting = visits[rank]
        try:
            visit.join(meeting)
        except NotThere:
            # Rank 0 has not listed the members yet: here nobody waits.
            continue
    own = {"operations": meter.operations / size, "transferred": meter.transferred / size}
    meter.reset()
    start = time.process_time()
    visits[0][0].join(visits[0][1])
    first = time.process_time() - start
    of_first = meter.operations
    meter.reset()
    start = time.process_time()
    for rank in range(1, READERS + 1):
        visit, meeting = visits[rank]
        known = len(visit.join(meeting).members())
    reading = (time.process_time() - start) / READERS
    for _, meeting in visits.values():
        meeting.close()
    return {
        "join: operations on the store": own["operations"] + meter.operations / READERS,
        "join: operations, rank 0": of_first,
        "join: CPU ms, rank 0": first * 1e3,
        "join: KB from the store": (own["transferred"] + meter.transferred / READERS) / 1024,
        "join: CPU ms": reading * 1e3,
        "members known": known,
    }


# The job.


def nothing() -> None:
    return None


def call_others(others: list[str]) -> None:
    for future in [rpc.rpc_async(other, nothing) for other in others]:
        future.wait()


def call_pattern(names: list[str]) -> Callable[[], None]:
    """One worker has each other call a few."""
    draw = random.Random(len(names))

    def main() -> None:
        futures = [
            rpc.rpc_async(name, call_others, args=(draw.sample(names, CALLS_PER_WORKER),))
            for name in names[1:]
        ]
        for future in futures:
            future.wait()

    return main


def grow(first: int, size: int, x: torch.Tensor) -> torch.Tensor:
    """The part of the tree below worker `first`: its children compute, and it adds."""
    children = range(first * FAN_OUT + 1, min(first * FAN_OUT + 1 + FAN_OUT, size))
    futures = [rpc.rpc_async(f"worker{c}", grow, args=(c, size, x)) for c in children]
    total = x * 2
    for future in futures:
        total = total + future.wait()
    return total


def context_over_tree(names: list[str]) -> Callable[[], None]:
    def main() -> None:
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            total = grow(0, len(names), x)
            autograd.backward(context, [total.sum()])
            gradient = autograd.get_gradients(context)[x]
        assert gradient.tolist() == [2.0 * len(names)] * 2

    return main


def make() -> int:
    return 1


def references_on_all(names: list[str]) -> Callable[[], None]:
    """One worker holds a value on each other, and passes each on to that one's neighbour."""

    def main() -> None:
        references = [rpc.remote(name, make) for name in names[1:]]
        for reference, neighbour in zip(references, names[2:], strict=False):
            rpc.rpc_sync(neighbour, fetch, args=(reference,))

    return main


def fetch(reference: Any) -> int:
    return int(reference.to_here())


def leave() -> None:
    current_node().services["closing"].close(0)


def leaving(names: list[str]) -> Mapping[str, Callable[[], None]]:
    return dict.fromkeys(names, leave)


PHASES: dict[str, Callable[[list[str]], Any]] = {
    f"{CALLS_PER_WORKER} calls of each": call_pattern,
    "a context over a tree of all": context_over_tree,
    "references, each passed on": references_on_all,
    "leaving": leaving,
}


def run_phases(size: int) -> Figures:
    register_layer("closing", Closing)
    names = [f"worker{number}" for number in range(size)]
    figures: Figures = {}
    before = _resident()
    for phase, prepare in PHASES.items():
        start = time.process_time()
        result = simulate(prepare(names), names, seed=_even_seed(), deadline=1e9, timeout=1e9)
        assert not result.leaks, result.leaks
        sent = Counter(event.worker for event in result.trace if event.what == "sends")
        figures[f"{phase}: messages"] = result.messages / size
        figures[f"{phase}: messages, most of any"] = max(sent.values())
        figures[f"{phase}: CPU ms"] = (time.process_time() - start) / size * 1e3
        if phase == next(iter(PHASES)):
            figures["memory, KB"] = (_resident() - before) / size / 1024
        del result
        print(f"{size:,} workers: {phase}, done", file=sys.stderr, flush=True)
    return figures


def _even_seed() -> int:
    """One of those for which the simulator draws in constant time."""
    return next(seed for seed in range(100) if random.Random(seed).random() < 0.5)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def heartbeats(known: int) -> Figures:
    """How many questions a worker asks per interval, if all are on hosts of their own."""
    ear = Listening(window=5.0, interval=0.5)
    for worker in range(1, known):
        ear.follow(worker)
    asked = sum(isinstance(action, Ask) for action in ear.tick(0.0))
    return {"heartbeats in an interval": asked}


def measure(size: int) -> Figures:
    joined = join(size)
    return {**joined, **heartbeats(int(joined["members known"])), **run_phases(size)}


# Showing.


def power(what: str, by_size: dict[int, float]) -> float:
    """The sum over all workers grows as their number to this power, between the last two sizes."""
    (fewer, less), (more, most) = list(by_size.items())[-2:]
    slope = math.log(max(most, 1e-3) / max(less, 1e-3)) / math.log(more / fewer)
    return slope if what.endswith(OF_ONE) else 1.0 + slope


def powers(by_size: dict[int, Figures]) -> dict[str, float]:
    whats = next(iter(by_size.values()))
    return {
        what: power(what, {size: figures[what] for size, figures in by_size.items()})
        for what in whats
    }


def is_count(what: str) -> bool:
    """Whether it is the same in every run; times are not."""
    return "CPU" not in what and "memory" not in what


def table(by_size: dict[int, Figures]) -> tuple[list[str], list[list[str]]]:
    head = ["per worker, in a job of", *(f"{size:,}" for size in by_size), "all grow as"]
    rows = []
    for what, exponent in powers(by_size).items():
        numbers = [f"{figures[what]:,.1f}" for figures in by_size.values()]
        rows.append([what, *numbers, f"n^{exponent:.2f}"])
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 1,000; nothing is written")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.size:
        print(json.dumps(measure(arguments.size)))
        return
    by_size = {}
    for size in QUICK_SIZES if arguments.quick else SIZES:
        start = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.many", "--size", str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        by_size[size] = json.loads(done.stdout.splitlines()[-1])
        print(f"{size:,} workers: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    head, rows = table(by_size)
    print(pages.plain(head, rows))
    if not arguments.quick:
        pages.write_section("many workers", pages.markdown(head, rows))
    unfair = [what for what, found in powers(by_size).items() if is_count(what) and found > FAIR]
    # In a small job each worker knows all others, by design.
    if unfair and not arguments.quick:
        raise SystemExit(f"grows faster than the workers: {', '.join(unfair)}")


if __name__ == "__main__":
    main()
