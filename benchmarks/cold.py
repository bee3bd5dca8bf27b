"""What code costs that runs once in a while: `python -m benchmarks.cold`.

A step of training runs each part of telegrad once, with computing or waiting in between. A loop
that calls one function again and again does not tell what that costs: here the same short work is
timed right after itself, after some time of spinning or sleeping, and in steps of training, on the
driver and on the worker. The last rows count what a step consists of.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.nn.functional import cross_entropy

import telegrad
from benchmarks import machine, pages
from benchmarks.scattered import look_at, scattered
from benchmarks.train import RATE, SIZES, build_part, look_at_the_clock
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.optim.owned import OwnedOptimizer
from telegrad.wire.codec import pack

TIMES = 400
OBJECTS = 2000
INTERRUPTED = 5e-6

Found = dict[str, list[tuple[float, float, float]]]

_found: Found = {}
_message = ("operation", ((1, 2, 3), "forward", (None, torch.ones(32, 64)), {}), {})
_numbers = torch.ones(8)
_objects = scattered(OBJECTS)


def _probe(where: str) -> None:
    """Three pieces of short work: of Python, of torch, and of memory alone."""
    start = time.perf_counter()
    pack(_message)
    packed = time.perf_counter()
    _numbers + _numbers
    added = time.perf_counter()
    look_at(_objects)
    looked = time.perf_counter()
    _found.setdefault(where, []).append((packed - start, added - packed, looked - added))


def _between() -> None:
    """In one process: after what the work was done once more."""
    waits: dict[str, Callable[[], None]] = {
        "right after itself": lambda: None,
        "after spinning for 0.2 ms": partial(look_at_the_clock, 0.0002),
        "after spinning for 1 ms": partial(look_at_the_clock, 0.001),
        "after spinning for 4 ms": partial(look_at_the_clock, 0.004),
        "after spinning for 8 ms": partial(look_at_the_clock, 0.008),
        "after sleeping for 1 ms": lambda: time.sleep(0.001),
        "after sleeping for 8 ms": lambda: time.sleep(0.008),
    }
    for where, wait in waits.items():
        for _ in range(TIMES):
            wait()
            _probe(where)


def _probe_steps() -> None:
    """On the worker: do the work whenever the optimizer is about to step."""
    torch.set_num_threads(1)
    step = OwnedOptimizer.step_here

    def probed(self: OwnedOptimizer) -> None:
        _probe("in a step of training, on the worker")
        step(self)

    OwnedOptimizer.step_here = probed  # type: ignore[method-assign]


def _take() -> Found:
    return _found


def _in_steps() -> tuple[Found, int]:
    """In steps of training; and how many functions of Python one step runs on the driver."""
    size = SIZES["small"]
    x, y = torch.randn(size.batch, size.width), torch.zeros(size.batch, dtype=torch.long)
    model = RemoteModule("worker1", build_part, (size, 1, 0))
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=RATE)
    rpc.rpc_sync("worker1", _probe_steps)

    def step(probe: Callable[[str], None]) -> None:
        with autograd.context() as context:
            loss = cross_entropy(model(x), y)
            autograd.backward(context, [loss])
            probe("in a step of training, on the driver")
            optimizer.step(context)

    for _ in range(TIMES):
        step(_probe)
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    step(lambda where: None)
    sys.setprofile(None)
    return rpc.rpc_sync("worker1", _take), calls[0]


def interruptions(seconds: float = 2.0) -> tuple[float, float]:
    """How often in a second a thread that only looks at the clock stands still, and how long."""
    stops = []
    now = time.perf_counter()
    until = now + seconds
    while now < until:
        before, now = now, time.perf_counter()
        if now - before > INTERRUPTED:
            stops.append(now - before)
    return len(stops) / seconds, median(stops) if stops else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _between()
    there, calls = telegrad.run(_in_steps, workers=1)
    rows = [
        [where, *(f"{1e6 * median(times):.1f} us" for times in zip(*found, strict=True))]
        for where, found in (_found | there).items()
    ]
    often, long = interruptions()
    head = ["", "packing a call", "adding two small tensors", f"looking at {OBJECTS:,} objects"]
    said = (
        f"A step of the small model on one worker runs {calls} functions of Python on the driver. "
        f"A thread that only looks at the clock stands still {often:.0f} times a second for more "
        f"than {1e6 * INTERRUPTED:.0f} us, {1e6 * long:.0f} us in the median."
    )
    print(pages.plain(head, rows), said, sep="\n")
    if arguments.write:
        text = f"Machine: {machine.describe()}.\n\n{pages.markdown(head, rows)}\n\n{said}"
        pages.write_section("cold", text)


if __name__ == "__main__":
    main()
