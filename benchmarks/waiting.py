"""What a step takes beyond one process if its module only waits: `python -m benchmarks.waiting`.

The small model of `train.py` on one worker, whose module also looks at the clock for a while, in
both directions. Nothing is computed in that time and no cache is filled, and who waits for a
message has nothing to do. What grows with it all the same is the price of code that did not run for
a while, for each peer alike: stock's is C++.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import machine, pages, slices
from benchmarks.floor import BARE, bare_step
from benchmarks.peers import Peer, Samples, run_peer, show
from benchmarks.train import (
    LOCAL,
    SIZES,
    local_step,
    lower_quartile,
    remote_step,
    step_as_one,
)

PROGRAM = "benchmarks.waiting"
WAITS = (0.0, 0.001, 0.002, 0.004, 0.008)
NAMES = (BARE, "telegrad", "stock")
SIZE_OF = {str(seconds): dataclasses.replace(SIZES["small"], waits=seconds) for seconds in WAITS}


def serve(name: str) -> None:
    torch.set_num_threads(1)
    make = local_step if name == LOCAL else lambda size: bare_step(size, 1)
    slices.serve({case: make(size) for case, size in SIZE_OF.items()})


def serve_peer(peer: Peer) -> Samples:
    torch.set_num_threads(1)
    make: Callable[..., Callable[[], None]]
    make = step_as_one if peer.name == "telegrad" else remote_step
    slices.serve({case: make(peer, size, 1) for case, size in SIZE_OF.items()})
    return {}


def measure(rounds: int, seconds: float) -> list[list[str]]:
    times: dict[tuple[str, str], list[float]] = {}
    for share in slices.shares(rounds):
        peers = [slices.Sliced(PROGRAM, name, stops=name == "stock") for name in (LOCAL, *NAMES)]
        with slices.started(peers):
            for _ in share:
                for case in SIZE_OF:
                    for peer in peers:
                        step = median(peer.run(case, seconds))
                        times.setdefault((case, peer.name), []).append(step)
                peers.reverse()
    rows = []
    for case in SIZE_OF:
        alone = lower_quartile(times[case, LOCAL])
        over = [lower_quartile(times[case, name]) - alone for name in NAMES]
        ratio = over[NAMES.index("telegrad")] / over[NAMES.index("stock")]
        rows.append([f"{1000 * float(case):.0f} ms", *map(show, over), f"{ratio:.2f}"])
    return rows


HEAD = ["overhead of a step that waits for twice", *NAMES, "telegrad to stock"]


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="how often each has its turn")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a turn takes")
    parser.add_argument("--write", action="store_true", help="write it to docs/performance.md")
    parser.add_argument("--serve", choices=(LOCAL, *NAMES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve in (LOCAL, BARE):
        serve(arguments.serve)
    elif arguments.serve:
        run_peer(arguments.serve, serve_peer, workers=1)
    else:
        rows = measure(arguments.rounds, arguments.seconds)
        print(pages.plain(HEAD, rows))
        if arguments.write:
            text = f"Machine: {machine.describe()}.\n\n{pages.markdown(HEAD, rows)}"
            pages.write_section("waiting", text)


if __name__ == "__main__":
    main()
