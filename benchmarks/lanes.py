"""What a second connection gains for large tensors in the clear: `python -m benchmarks.lanes`.

Echoes over TCP on loopback, in jobs with one connection and in jobs with two, in turn, each job of
two new processes. Where two are used they are from 1 MB on, in order to find where they should be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

from benchmarks import pages, tensors
from benchmarks.peers import show
from telegrad.wire import lane

SIZES = {f"{megabytes} MB": megabytes << 18 for megabytes in (1, 2, 4, 8, 16, 64)}


def one_connection() -> None:
    lane.THRESHOLD = sys.maxsize


def two_connections() -> None:
    lane.THRESHOLD = 1 << 20


def times_of(before: Callable[[], None]) -> dict[str, float]:
    """The median of each size in a job of its own."""
    caller = tensors.start("TCP", before)
    medians = {}
    for size, elements in SIZES.items():
        for _ in range(2):  # The first opens the connection, and takes memory.
            caller.send(elements)
            medians[size] = statistics.median(caller.recv())
    caller.send(0)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lanes", description=__doc__)
    parser.add_argument("--jobs", type=int, default=5, help="of each kind")
    parser.add_argument("--write", action="store_true", help="write the table to the docs")
    arguments = parser.parse_args()
    ways = {"one connection": one_connection, "two": two_connections}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(arguments.jobs):
        for way, before in ways.items():
            found[way].append(times_of(before))
    medians = {
        way: [statistics.median(job[size] for job in jobs) for size in SIZES]
        for way, jobs in found.items()
    }
    rows = [[way, *map(show, times)] for way, times in medians.items()]
    one, two = medians.values()
    rows.append(["ratio", *(f"{b / a:.2f}" for a, b in zip(one, two, strict=True))])
    each = [[a["64 MB"], b["64 MB"]] for a, b in zip(*found.values(), strict=True)]
    jobs = ", ".join(f"{b / a:.2f}" for a, b in each)
    text = f"64 MB, job by job: {jobs}."
    head = ["echo of", *SIZES]
    print(pages.plain(head, rows), text, sep="\n\n")
    if arguments.write:
        pages.write_section("lanes", f"{pages.markdown(head, rows)}\n\n{text}")


if __name__ == "__main__":
    main()
