"""How costs grow: `python -m benchmarks.scaling`.

Each case is one thing that a job can have more of. It is done for 1, 4, 16 and so on, until the
largest number that is worth a try or until one run takes too long, and the exponent is the slope of
a line through the points of the upper half of the range, in logarithmic scale. At 1 the cost is
linear: each call, worker, context, reference or node costs the same however many there are.

A point is the shortest of a few runs, as everything that disturbs a run makes it longer; with many
workers it is the median of many short ones, whose shortest is luck: that of all processes which the
scheduler happened to put on the right cores.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.futures import Future

import telegrad
from benchmarks import machine, pages
from benchmarks.peers import show
from benchmarks.scattered import look_at, scattered
from telegrad import autograd, rpc
from telegrad.autograd.api import autograd_of
from telegrad.autograd.context import working_in
from telegrad.wire.codec import pack, unpack

LINEAR = 1.15
"""What a fitted exponent may be for a cost that is linear, on a machine that is not quiet."""
STEP = 4
LONGEST_RUN = 4.0
RUNS = 3
ROUNDS = 60
OBJECTS = 3000
"""Each in a cache line of its own: 64 processes go through 12 MB."""

Points = dict[int, float]
"""Seconds for each number of things."""


@dataclass(frozen=True)
class Case:
    """Something to have more of; `prepare(n)` returns what is to be timed."""

    what: str
    most: int
    prepare: Callable[[int], Callable[[], object]]


# What workers run.

_held: list[Future[None]] = []
_holds = threading.Condition()


@rpc.functions.async_execution
def hold() -> Future[None]:
    """Answer only when `let_go` is called."""
    future: Future[None] = Future()
    with _holds:
        _held.append(future)
        _holds.notify()
    return future


def let_go(count: int) -> None:
    with _holds:
        _holds.wait_for(lambda: len(_held) == count)
        held = _held[:]
        _held.clear()
    for future in held:
        future.set_result(None)


def nothing() -> None:
    return None


def value() -> int:
    return 7


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# The cases.


def calls_in_flight(count: int) -> Callable[[], object]:
    def run() -> None:
        futures = [rpc.rpc_async("worker1", hold) for _ in range(count)]
        rpc.rpc_sync("worker1", let_go, args=(count,))
        for future in futures:
            future.wait()

    return run


def contexts_open(count: int) -> Callable[[], object]:
    """All are open at once, each with a call and a pass, before the first is closed."""
    x = torch.ones(4, requires_grad=True)

    def run() -> None:
        service = autograd_of()
        contexts = [service.new_context() for _ in range(count)]
        for context in contexts:
            with working_in(context):
                y = rpc.rpc_sync("worker1", twice, args=(x,))
                autograd.backward(context.id, [y.sum()])
        for context in contexts:
            service.release(context.id)
        # Releases are told a little later, and are part of what contexts cost.
        rpc.rpc_sync("worker1", await_releases)

    return run


def await_releases() -> None:
    container = autograd_of().container
    while len(container):
        time.sleep(0.0005)


def references_held(count: int) -> Callable[[], object]:
    def run() -> None:
        references = [rpc.remote("worker1", value) for _ in range(count)]
        references[-1].to_here()
        references.clear()
        while rpc.rpc_sync("worker1", owned):
            time.sleep(0.0005)

    return run


def owned() -> int:
    from telegrad.rpc.current import current_node

    return int(current_node().values.debug_info()["owned"])


def graph_nodes(count: int) -> Callable[[], object]:
    """One hop, and a graph of so many nodes on the caller's side."""
    x = torch.ones(4, requires_grad=True)

    def run() -> None:
        with autograd.context() as context:
            y = rpc.rpc_sync("worker1", twice, args=(x,))
            for _ in range(count):
                y = y * 1.0001
            autograd.backward(context, [y.sum()])

    return run


def hops(count: int) -> Callable[[], object]:
    x = torch.ones(4, requires_grad=True)

    def run() -> None:
        with autograd.context() as context:
            y = x
            for _ in range(count):
                y = rpc.rpc_sync("worker1", twice, args=(y,))
            autograd.backward(context, [y.sum()])

    return run


CASES = (
    # A worker takes 16,384 calls of another at a time, and one more is needed to let them go.
    Case("calls in flight", 1 << 12, calls_in_flight),
    Case("contexts open", 1 << 12, contexts_open),
    Case("references held", 1 << 14, references_held),
    Case("nodes of a graph", 1 << 16, graph_nodes),
    Case("hops of one pass", 1 << 10, hops),
)


def measure(case: Case, most: int) -> Points:
    points: Points = {}
    count = 1
    while count <= most:
        run = case.prepare(count)
        run()
        points[count] = min(_timed(run) for _ in range(RUNS))
        if points[count] * STEP > LONGEST_RUN:
            break
        count *= STEP
    return points


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# Workers are counted from outside: each number of them is a job of its own.


def workers(most: int) -> dict[str, Points]:
    calls: Points = {}
    jobs: Points = {}
    count = 1
    while count <= most:
        start = time.perf_counter()
        calls[count] = telegrad.run(lambda: _call_all(), workers=count, timeout=120.0)
        jobs[count] = time.perf_counter() - start
        count *= 2
    return {"workers: a call to each": calls, "workers: the whole job": jobs}


def bare_processes(most: int, objects: int) -> Points:
    """The same calls, packed and unpacked, between processes that have a socket and nothing else,
    and look at so many objects of their own for each call.

    What grows here grows with the processes that take turns on the cores, not with the job.
    """
    points: Points = {}
    count = 1
    while count <= most:
        ends = [_fork_bare(objects) for _ in range(count)]
        message = bytes(pack((nothing, (), {})).meta)

        def run(ends: list[socket.socket] = ends, message: bytes = message) -> None:
            for end in ends:
                end.send(message)
            for end in ends:
                unpack(end.recv(4096), [])

        run()
        points[count] = statistics.median(_timed(run) for _ in range(ROUNDS))
        while ends:
            # From the last on: each process has inherited the ends of those before it.
            ends.pop().close()
            os.wait()
        count *= 2
    return points


def _fork_bare(count: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        objects = scattered(count)
        while data := theirs.recv(4096):
            function, args, kwargs = unpack(data, [])
            look_at(objects)
            theirs.send(bytes(pack(function(*args, **kwargs)).meta))
        os._exit(0)
    theirs.close()
    return ours


def _call_all() -> float:
    me = rpc.get_worker_info()
    others = [info for info in rpc.get_worker_infos() if info != me]

    def run() -> None:
        for future in [rpc.rpc_async(other, nothing) for other in others]:
            future.wait()

    run()
    return statistics.median(_timed(run) for _ in range(ROUNDS))


# Judging and showing.


def exponent(points: Points) -> float:
    """The slope of the upper half of the range in logarithmic scale; NaN with too few points."""
    middle = math.sqrt(max(points))
    upper = [(math.log(n), math.log(t)) for n, t in points.items() if n >= middle]
    if len(upper) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*upper, strict=True)).slope


def table(results: dict[str, Points]) -> tuple[list[str], list[list[str]]]:
    head = ["", "up to", "one alone", "each, of all", "exponent", "linear or better"]
    rows = []
    for what, points in results.items():
        most, slope = max(points), exponent(points)
        verdict = "yes" if slope <= LINEAR else "no"
        each = show(points[most] / most)
        rows.append([what, f"{most:,}", show(points[1]), each, f"{slope:.2f}", verdict])
    return head, rows


def draw(results: dict[str, Points]) -> bool:
    pyplot = pages.pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for what, points in results.items():
        each = [seconds / count * 1e6 for count, seconds in points.items()]
        axes.plot(list(points), each, marker="o", markersize=3, label=what)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("how many")
    axes.set_ylabel("microseconds for each of them")
    axes.set_title("Costs of one, beside others: a level line is linear", fontsize=9)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    pages.save(figure, "scaling.svg")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--workers", type=int, default=64, help="the largest job to start")
    parser.add_argument("--quick", action="store_true", help="up to 256, nothing is written")
    parser.add_argument("--only", help="cases whose name contains this")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.only or "") in case.what]
    most = 256 if arguments.quick else 1 << 20

    def run_cases() -> dict[str, Points]:
        return {case.what: measure(case, min(most, case.most)) for case in cases}

    most_workers = 8 if arguments.quick else arguments.workers
    # First of all: to fork is safe while there are no threads.
    bare = {
        "bare processes: a call to each": bare_processes(most_workers, 0),
        f"the same, looking at {OBJECTS:,} objects": bare_processes(most_workers, OBJECTS),
    }
    results = telegrad.run(run_cases, workers=1)
    if (arguments.only or "") in "workers":
        results |= workers(most_workers) | bare
    head, rows = table(results)
    print(machine.describe())
    print(pages.plain(head, rows))
    for what, points in results.items():
        line = ", ".join(f"{n:,}: {show(seconds / n)}" for n, seconds in points.items())
        print(f"{what}: {line}")
    if arguments.quick or arguments.only:
        return
    text = f"Machine: {machine.describe()}.\n\n{pages.markdown(head, rows)}"
    if draw(results):
        text += "\n\n![What each of many costs](scaling.svg)"
    pages.write_section("scaling", text)


if __name__ == "__main__":
    main()
