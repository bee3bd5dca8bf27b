"""The long run: many random programs on workers, each compared with one process.

    python -m tests.autograd.programs --count 10000 --features hook,custom,module,passes
    python -m tests.autograd.programs --seed 4711 --count 1 --features hook
    python -m tests.autograd.programs --second-order
    python -m tests.autograd.programs --processes --count 330
    python -m tests.autograd.programs --simulated --count 11000
    python -m tests.autograd.programs --simulated --faults --count 11000

A failing program prints its seed and features, which is all it takes to run it again.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from telegrad.autograd.messages import Mode
from tests.autograd.comparison import Skip, compare_one
from tests.autograd.processes import compare_over_processes, four_workers
from tests.autograd.program import FEATURES
from tests.autograd.second_order import compare_second_order
from tests.autograd.simulated import compare_simulated

EVERYTHING = "checkpoint,custom,hook,late,module,passes,post,sparse"

Compare = Callable[[int, frozenset[str]], str]


def outcomes(
    seeds: Sequence[int], features: frozenset[str], compare: Compare = compare_one
) -> Iterator[tuple[int, str]]:
    """For each seed what became of its program; anything that starts with FAILED is a bug."""
    for seed in seeds:
        try:
            yield seed, compare(seed, features)
        except Skip as skip:
            yield seed, f"skipped: {skip}"
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-4:])
            yield seed, f"FAILED {type(error).__name__}: {str(error)[:300]}\n{text}"


def _run(seeds: Sequence[int], features: frozenset[str], compare: Compare) -> Counter[str]:
    tally: Counter[str] = Counter()
    for seed, outcome in outcomes(seeds, features, compare):
        kind = outcome.split(":")[0].split("\n")[0]
        tally[kind] += 1
        if tally.total() % 200 == 0:
            gc.collect()  # The simulator holds the automatic one off.
        if outcome.startswith("FAILED") and tally[kind] <= 3:
            print(f"seed {seed}, features {','.join(sorted(features))}: {outcome}", flush=True)
    return tally


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--features", help="comma-separated; by default a good part of them")
    parser.add_argument("--second-order", action="store_true", help="gradients of gradients")
    parser.add_argument("--processes", action="store_true", help="over four real processes")
    parser.add_argument("--simulated", action="store_true", help="in the simulator")
    parser.add_argument(
        "--faults", action="store_true", help="simulated: a bad network, and workers that die"
    )
    parser.add_argument("--fast", action="store_true", help="in FAST mode: equal, or a named error")
    given = parser.parse_args(arguments)
    if given.faults and not given.simulated:
        parser.error("--faults are those of the simulator: say --simulated, too")
    chosen = given.features
    if chosen is None:
        chosen = EVERYTHING if given.simulated else "hook,custom,module,passes"
    features = frozenset(chosen.split(",")) - {""}
    unknown = features - FEATURES
    if unknown:
        parser.error(f"unknown features {sorted(unknown)}; there are {sorted(FEATURES)}")
    warnings.simplefilter("ignore")
    started = time.monotonic()
    seeds = range(given.seed, given.seed + given.count)
    compare: Compare = compare_second_order if given.second_order else compare_one
    mode = Mode.FAST if given.fast else Mode.SMART
    if given.simulated:
        compare = partial(compare_simulated, mode=mode, with_faults=given.faults)
    elif given.fast:
        compare = partial(compare_one, mode=mode)
    if given.processes:
        with four_workers() as names:
            tally = _run(seeds, features, partial(compare_over_processes, names=names))
    else:
        tally = _run(seeds, features, compare)
    print(dict(tally), f"{time.monotonic() - started:.0f} s")
    return int(any(kind.startswith("FAILED") for kind in tally))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
