"""Where the time of one hop goes: `python -m benchmarks.hop`.

A hop is a call of a function that multiplies by a weight, on another worker of the same host, and
the backward pass through it. Both workers note when they read a message and when they write one;
they have the same clock. So the time of a hop falls into what the kernel takes to carry a message
and what each worker takes between two messages. The latter is Python and torch; of torch's part an
estimate is what the same operations, graph nodes and engine calls take in one process.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

import telegrad
from benchmarks import machine, pages
from benchmarks.autograd import step
from benchmarks.peers import sample
from telegrad import autograd, rpc
from telegrad.rpc.current import current_node

HOPS = 2000
Events = list[tuple[str, float]]

_events: Events = []


class Noting:
    """A stream that notes when a message has come and when one leaves."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def recv_into(self, view: memoryview) -> int:
        count: int = self._stream.recv_into(view)
        _events.append(("read", time.monotonic()))
        return count

    def try_send(self, parts: Any) -> int:
        _events.append(("write", time.monotonic()))
        sent: int = self._stream.try_send(parts)
        _events.append(("written", time.monotonic()))
        return sent


def begin_to_note() -> None:
    transport: Any = current_node().transport
    for end in transport.ends():
        end.link.stream = Noting(end.link.stream)


def noted() -> Events:
    events, _events[:] = list(_events), []
    return events


def _hop(x: torch.Tensor) -> None:
    with autograd.context() as context:
        y = rpc.rpc_sync("worker1", step, args=(x,))
        _events.append(("called", time.monotonic()))
        autograd.backward(context, [y.sum()])
        _events.append(("back", time.monotonic()))


CALLER = ("write", "written", "read", "called", "write", "written", "read", "back")
CALLEE = ("read", "write", "written") * 2
PARTS = (
    ("caller: the call is packed", lambda c, w, t: c[0] - t),
    ("callee: unpacks, runs the function, packs", lambda c, w, t: w[1] - w[0]),
    ("caller: unpacks the result", lambda c, w, t: c[3] - c[2]),
    ("caller: begins the pass, runs its graph, packs", lambda c, w, t: c[4] - c[3]),
    ("callee: unpacks, runs its graph, packs", lambda c, w, t: w[4] - w[3]),
    ("caller: unpacks, ends the pass", lambda c, w, t: c[7] - c[6]),
    (
        "four messages under way",
        lambda c, w, t: w[0] - c[0] + c[2] - w[1] + w[3] - c[4] + c[6] - w[4],
    ),
    ("the whole hop", lambda c, w, t: c[7] - t),
)


def measure() -> dict[str, list[float]]:
    """The parts of each hop, in seconds; hops with other messages in between are left out."""
    x = torch.ones(8, 8, requires_grad=True)
    for _ in range(300):
        _hop(x)
    begin_to_note()
    rpc.rpc_sync("worker1", begin_to_note)
    _hop(x)
    rpc.rpc_sync("worker1", noted)
    here: list[tuple[float, Events]] = []
    for _ in range(HOPS):
        _events.clear()
        start = time.monotonic()
        _hop(x)
        here.append((start, noted()))
    there = rpc.rpc_sync("worker1", noted)
    parts: dict[str, list[float]] = {name: [] for name, _ in PARTS}
    for start, events in here:
        end = events[-1][1]
        during = [event for event in there if start < event[1] < end]
        if tuple(kind for kind, _ in events) == CALLER and _kinds(during) == CALLEE:
            caller, callee = ([at for _, at in each] for each in (events, during))
            for name, part in PARTS:
                parts[name].append(part(caller, callee, start))
    return parts


def _kinds(events: Events) -> tuple[str, ...]:
    return tuple(kind for kind, _ in events)


def torch_alone() -> float:
    """The same operations and two engine calls, without anything that crosses."""
    x = torch.ones(8, 8, requires_grad=True)

    def run() -> None:
        y = step(x)
        loss = y.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss.sum(), loss)
        torch.autograd.grad(y, x, gradient)

    return median(sample(run, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    arguments = parser.parse_args()
    alone = torch_alone()
    parts = telegrad.run(measure, workers=1)
    whole = parts["the whole hop"]
    quick = sorted(range(len(whole)), key=whole.__getitem__)[: len(whole) // 10]
    rows = [
        [name, *(f"{1e6 * median(each):.0f} us" for each in (times, [times[i] for i in quick]))]
        for name, times in parts.items()
    ]
    rows.append(["torch's operations and engine calls alone", f"{1e6 * alone:.0f} us", ""])
    head = ["", "median", "of the quickest tenth"]
    print(pages.plain(head, rows))
    if arguments.write:
        text = f"Machine: {machine.describe()}.\n\n{pages.markdown(head, rows)}"
        pages.write_section("hop", text)


if __name__ == "__main__":
    main()
