"""Where the time of a step with two remote parts goes: `python -m benchmarks.step`.

The two parts are a `RemoteSequential`, and the step of their optimizer is a part of the backward
pass. All three workers note when they write a message and when one has come, and when they compute;
they have the same clock. Printed are the medians since the beginning of the step, over
the steps with the usual messages, and what lies between two of them.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from statistics import median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import telegrad
from benchmarks import machine, pages
from benchmarks.train import RATE, SIZES, build_part, make_inputs
from telegrad import autograd, rpc
from telegrad.autograd import torch_private
from telegrad.nn import RemoteModule, RemoteSequential
from telegrad.optim import DistributedOptimizer, owned
from telegrad.rpc.current import current_node

WARM_UP = 100
STEPS = 400
WORKERS = ("worker1", "worker2")
BEGINS = "driver: the step begins"

Event = tuple[float, str]

_events: list[Event] = []


class Noting:
    """A stream that notes what goes where."""

    def __init__(self, stream: Any, here: str, there: str) -> None:
        self._stream = stream
        self._reads = f"{here} reads what {there} wrote"
        self._writes = f"{here} writes to {there}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def recv_into(self, view: memoryview) -> int:
        count: int = self._stream.recv_into(view)
        _events.append((time.monotonic(), self._reads))
        return count

    def try_send(self, parts: Any) -> int:
        _events.append((time.monotonic(), self._writes))
        sent: int = self._stream.try_send(parts)
        return sent


def note_computing(here: str) -> None:
    """Note when a module, the engine and an optimizer begin and end."""
    for owner, name, what in (
        (torch.nn.Sequential, "forward", "its module"),
        (torch_private, "run_engine", "its graph"),
        (owned, "step_quietly", "its optimizer"),
    ):
        work: Any = getattr(owner, name)

        def noting(*args: Any, work: Any = work, what: str = what, **kwargs: Any) -> Any:
            _events.append((time.monotonic(), f"{here} runs {what}"))
            try:
                return work(*args, **kwargs)
            finally:
                _events.append((time.monotonic(), f"{here} has run {what}"))

        setattr(owner, name, noting)


def begin_to_note() -> None:
    torch.set_num_threads(1)
    node = current_node()
    note_computing(_called(node.info.name))
    transport: Any = node.transport
    for end in transport.ends():
        names = (_called(name) for name in (node.info.name, end.member.info.name))
        end.link.stream = Noting(end.link.stream, *names)


def _called(name: str) -> str:
    return "driver" if name == "main" else name


def noted() -> list[Event]:
    events, _events[:] = list(_events), []
    return events


def measure() -> list[tuple[str, float]]:
    size = SIZES["small"]
    x, y = make_inputs(size)
    modules = [
        RemoteModule(name, build_part, (size, len(WORKERS), number))
        for number, name in enumerate(WORKERS)
    ]
    model = RemoteSequential(*modules)
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=RATE)

    def note(what: str) -> None:
        _events.append((time.monotonic(), what))

    def step() -> None:
        note(BEGINS)
        with autograd.context() as context:
            output = model(x)
            note("driver: the output is here")
            loss = cross_entropy(output, y)
            note("driver: the loss is computed")
            optimizer.backward_and_step(context, [loss])
            note("driver: all have stepped")

    for _ in range(WARM_UP):
        step()
    begin_to_note()
    for name in WORKERS:
        rpc.rpc_sync(name, begin_to_note)
    step()
    for name in WORKERS:
        rpc.rpc_sync(name, noted)
    noted()
    for _ in range(STEPS):
        step()
    events = noted()
    for name in WORKERS:
        events += rpc.rpc_sync(name, noted)
    return usual(sorted(events))


def usual(events: list[Event]) -> list[tuple[str, float]]:
    """What happens in the most frequent kind of step, and when in the median."""
    begins = [at for at, what in events if what == BEGINS]
    steps: defaultdict[int, list[Event]] = defaultdict(list)
    for at, what in events:
        number = bisect_right(begins, at) - 1
        if number >= 0:
            steps[number].append((at - begins[number], what))
    kinds = Counter(tuple(sorted(what for _, what in step)) for step in steps.values())
    usual, _ = kinds.most_common(1)[0]
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps.values():
        if tuple(sorted(what for _, what in step)) == usual:
            met: Counter[str] = Counter()
            for at, what in step:
                met[what] += 1
                times[what, met[what]].append(at)
    return sorted(((what, median(at)) for (what, _), at in times.items()), key=lambda row: row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = telegrad.run(measure, workers=len(WORKERS))
    before = [0.0, *(at for _, at in found)]
    rows = [
        [what, f"{1e6 * at:.0f} us", f"{1e6 * (at - last):.0f} us"]
        for (what, at), last in zip(found, before, strict=False)
    ]
    head = ["", "at", "after"]
    print(pages.plain(head, rows))
    if arguments.write:
        pages.write_section(
            "step", f"Machine: {machine.describe()}.\n\n{pages.markdown(head, rows)}"
        )


if __name__ == "__main__":
    main()
