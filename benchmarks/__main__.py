"""`python -m benchmarks`: stock torch RPC, Ray's actors, gRPC and telegrad, side by side.

The peers take turns for several rounds, each alone on the machine (see `peers.py`). What is
printed, drawn and written to docs/performance.md are medians over all rounds, and their ratio to
stock's, beside the ratio that telegrad aims at. Calls are made by all four; distributed backward
and training only by the two that have them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks import machine, pages, train
from benchmarks.peers import CALLERS, PEERS, Samples, show, turn

PROGRAMS = {
    "benchmarks.rpc": CALLERS,
    "benchmarks.autograd": PEERS,
}
SLICE_SECONDS = 0.3
MODULES = {"ray": "ray", "grpc": "grpc"}
QUIET = 1.5
"""A load above which numbers are not to be trusted."""


@dataclass(frozen=True)
class Row:
    """A line of the table: what is done, the case that measures it, and the ratio aimed at."""

    work: str
    case: str
    target: float


ROWS = (
    Row("no-op call", "no-op", 0.35),
    Row("echo of a 1-element tensor", "echo, 1 element", 0.30),
    Row("echo of 64 KB", "echo, 64 KB", 0.50),
    Row("echo of 1 MB", "echo, 1 MB", 0.50),
    Row("echo of 64 MB", "echo, 64 MB", 0.35),
    Row("burst of 1,000 async calls", "burst of 1000 async calls", 0.30),
    Row("8 client threads, per call", "8 threads, time per call", 1 / 3),
    Row("1 hop, forward and backward", "1 hop", 0.30),
    Row("10 hops, forward and backward", "10 hops", 0.30),
    *[
        Row(f"training, {size}, {count}{way}: overhead", f"{case}{way}: overhead", 0.40)
        for way in (", as one", "")
        for size in train.SIZES
        for count, case in (
            ("1 part", train.remote_case(size, 1)),
            ("2 parts", train.remote_case(size, 2)),
        )
    ],
    Row("CPU of a call, both ends", "CPU of a no-op, both ends", 1.00),
)

Medians = dict[str, dict[str, float]]
"""By peer, then by case."""


def gather(rounds: int, pace: float) -> tuple[Medians, list[str]]:
    """Let all peers have their turns; also what went wrong, in words."""
    samples: dict[str, Samples] = {peer: {} for peer in CALLERS}
    problems = [
        f"{peer} is not installed (requirements-bench.txt)"
        for peer, module in MODULES.items()
        if find_spec(module) is None
    ]
    absent = {peer for peer, module in MODULES.items() if find_spec(module) is None}
    for number in range(1, rounds + 1):
        for program, peers in PROGRAMS.items():
            for peer in peers:
                if peer in absent:
                    continue
                print(f"round {number} of {rounds}: {program}, {peer}", file=sys.stderr, flush=True)
                try:
                    measured = turn(program, peer, pace)
                except (subprocess.SubprocessError, ValueError) as error:
                    if peer in PEERS:
                        raise
                    absent.add(peer)
                    problems.append(f"{peer} was given up in round {number}: {error}")
                    continue
                for case, times in measured.items():
                    samples[peer].setdefault(case, []).extend(times)
    # Steps of training are compared by a difference: those peers take shorter turns.
    slices = max(2, round(3 * rounds * min(1.0, 2.5 * pace)))
    for peer, measured in train.measure(slices, SLICE_SECONDS).items():
        samples[peer].update(measured)
    medians = {
        peer: {case: statistics.median(times) for case, times in cases.items()}
        for peer, cases in samples.items()
    }
    return medians, problems


def ratio(medians: Medians, peer: str, row: Row) -> float:
    """To stock's median; NaN if the peer cannot do this work."""
    return medians[peer].get(row.case, math.nan) / medians["stock"][row.case]


def table(medians: Medians) -> tuple[list[str], list[list[str]]]:
    head = ["", *CALLERS, "ratio", "target", "met"]
    rows = []
    for row in ROWS:
        reached = ratio(medians, "telegrad", row)
        cells = [
            show(medians[peer][row.case]) if row.case in medians[peer] else "" for peer in CALLERS
        ]
        met = "yes" if reached <= row.target else "no"
        rows.append([row.work, *cells, f"{reached:.2f}", f"{row.target:.2f}", met])
    return head, rows


def draw(medians: Medians) -> bool:
    """Bars of the ratios to stock. Whether there is a picture."""
    pyplot = pages.pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 6.5))
    colors = {"ray": "#9aa5b1", "grpc": "#cbd2d9", "telegrad": "#d64545"}
    height = 0.26
    for offset, (peer, color) in enumerate(colors.items()):
        places = [number + (offset - 1) * height for number in range(len(ROWS))]
        ratios = [ratio(medians, peer, row) for row in ROWS]
        axes.barh(places, ratios, height, color=color, label=peer)
    for number, row in enumerate(ROWS):
        label = "target" if number == 0 else None
        edges = (number - 0.45, number + 0.45)
        axes.plot([row.target] * 2, edges, color="black", linewidth=1.5, label=label)
    axes.axvline(1.0, color="#52606d", linewidth=1, linestyle="--", label="stock torch RPC")
    axes.set_yticks(range(len(ROWS)), [row.work for row in ROWS])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time as a ratio to stock torch RPC (less is better)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncol=5, frameon=False)
    pages.save(figure, "performance.svg")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how often each peer has its turn")
    parser.add_argument("--pace", type=float, default=0.4, help="1: measure each case for a second")
    parser.add_argument("--quick", action="store_true", help="one short round, nothing is written")
    parser.add_argument("--json", help="also write all medians to this file")
    arguments = parser.parse_args()
    rounds, pace = (1, 0.1) if arguments.quick else (arguments.rounds, arguments.pace)
    load = machine.load()
    if load > QUIET:
        print(f"The load is {load:.1f}: others use this machine too.", file=sys.stderr)
    medians, problems = gather(rounds, pace)
    head, rows = table(medians)
    print(machine.describe())
    print(pages.plain(head, rows))
    for problem in problems:
        print(problem)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(medians, file, indent=1)
    if arguments.quick:
        return
    drawn = draw(medians)
    text = f"Machine: {machine.describe()}. Load before the run: {load:.1f}; rounds: {rounds}.\n\n"
    text += pages.markdown(head, rows)
    if drawn:
        text += "\n\n![Times as ratios to stock torch RPC](performance.svg)"
    pages.write_section("comparison", "\n\n".join((text, *problems)))
    print(f"written to {pages.PAGE.relative_to(pages.DOCS.parent)}")


if __name__ == "__main__":
    main()
