"""How many instructions of Python a piece of work takes: `python -m benchmarks.bytecodes`.

Times on a shared machine differ by a tenth from one minute to the next; the instructions that the
interpreter runs do not. So whether a change makes a hop or a step shorter is told by this program,
and by how much by the others. Instructions are counted on the thread that runs the work and, on
each worker, on the one that serves the driver; what other threads do there is not seen. They are
counted after enough runs that nothing is done for the first time, without those of looking for the
next message: how often a thread looks depends on how long it waits. Each worker's count includes
what it takes to begin and to end the counting, as is shown where it has no part in the work. On a
machine that is busy requests take long, other threads come to serve, and less is seen.

With `--functions` it also says how often each function was called: what runs once in a step costs
as much for its being called as for its instructions.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

import torch

import telegrad
from benchmarks import autograd as hops
from benchmarks import pages, train
from benchmarks.peers import Peer
from telegrad import autograd, rpc

RUNS = 21
WARM_UP = 300
WORKERS = ("worker1", "worker2")

_counts: Counter[str] = Counter()
_calls: Counter[str] = Counter()


def begin() -> None:
    """Count from now on, in functions that this thread enters."""
    _counts.clear()
    _calls.clear()
    sys.settrace(_entered)


def taken() -> tuple[dict[str, int], dict[str, int]]:
    """By file and function, the instructions and calls that were counted since `begin`."""
    sys.settrace(None)
    return dict(_counts), dict(_calls)


def _entered(frame: FrameType, event: str, argument: Any) -> Any:
    file = _short(frame.f_code.co_filename)
    if file == "wire/lookout.py" or (file == "rpc/lobby.py" and frame.f_code.co_name == "_look"):
        return None
    name = f"{file}:{frame.f_code.co_qualname}"
    _calls[name] += 1
    frame.f_trace_opcodes = True
    frame.f_trace_lines = False

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            _counts[name] += 1
        return count

    return count


def _short(path: str) -> str:
    for root in ("telegrad/", "site-packages/"):
        _, found, rest = path.rpartition(root)
        if found:
            return rest
    return "elsewhere"


def works() -> dict[str, Callable[[], object]]:
    peer = Peer("telegrad", rpc, autograd)
    x = torch.ones(8, 8, requires_grad=True)
    small = train.SIZES["small"]
    return {
        "no-op": lambda: rpc.rpc_sync("worker1", _nothing),
        "hop": hops._hops(peer, x, 1, "smart"),
        **{f"small step, {parts}": train.step_as_one(peer, small, parts) for parts in train.PARTS},
        **{
            f"small step, {parts}, call by call": train.remote_step(peer, small, parts)
            for parts in train.PARTS
        },
    }


def _nothing() -> None: ...


def measure() -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """By work, worker and function: the median numbers of instructions and of calls."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for name, work in works().items():
        for _ in range(WARM_UP):
            work()
        runs = [_counted(work) for _ in range(RUNS)]
        found[name] = {
            worker: {
                function: (
                    median(counts.get(function, 0) for counts, _ in (run[worker] for run in runs)),
                    median(calls.get(function, 0) for _, calls in (run[worker] for run in runs)),
                )
                for function in sorted({each for run in runs for each in run[worker][0]})
            }
            for worker in ("driver", *WORKERS)
        }
    return found


def _counted(work: Callable[[], object]) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    for worker in WORKERS:
        rpc.rpc_sync(worker, begin)
    begin()
    work()
    here = taken()
    return {"driver": here, **{worker: rpc.rpc_sync(worker, taken) for worker in WORKERS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="by file, not by package")
    parser.add_argument("--functions", action="store_true", help="by function")
    arguments = parser.parse_args()
    for name, workers in telegrad.run(measure, workers=len(WORKERS)).items():
        totals: dict[str, Counter[str]] = {}
        calls: Counter[str] = Counter()
        for worker, functions in workers.items():
            for function, (count, called) in functions.items():
                file = function.partition(":")[0]
                part = file if arguments.files else file.partition("/")[0]
                part = function if arguments.functions else part
                totals.setdefault(part, Counter())[worker] += round(count)
                calls[part] += round(called)
        rows = [
            [part, *(str(counts[worker]) for worker in workers), str(counts.total())]
            for part, counts in sorted(totals.items(), key=lambda item: -item[1].total())
        ]
        sums = [sum(counts[worker] for counts in totals.values()) for worker in workers]
        rows.append(["all", *map(str, sums), str(sum(sums))])
        for row in rows:
            row.append(str(calls.total() if row[0] == "all" else calls[row[0]]))
        print(pages.plain([name, *workers, "all", "calls"], rows), end="\n\n")


if __name__ == "__main__":
    main()
