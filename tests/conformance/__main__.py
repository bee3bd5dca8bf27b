"""PyTorch's own RPC suites, run against telegrad.

    python -m tests.conformance                      all that telegrad runs, and a table
    python -m tests.conformance --stock              the same on stock torch
    python -m tests.conformance --repeat 3           three runs in a row
    python -m tests.conformance -k 'DistAutogradTest.test_backward' --limit 30

Ends with an error if anything but what `cases.py` expects went otherwise than passed.
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conformance.cases import LEFT_OUT, RUN_KINDS, Case, all_cases, cases_to_run
from tests.conformance.nursery import Nursery, Outcome

Results = list[tuple[Case, Outcome]]


def run_cases(
    cases: Sequence[Case], implementation: str, limit: float, jobs: int, logs: Path
) -> Iterator[tuple[Case, Outcome]]:
    """Each case with what became of it, as they end."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[Case, Outcome] | BaseException] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)

    def work(directory: Path) -> None:
        nursery = Nursery(implementation, directory)
        try:
            while True:
                case = waiting.get_nowait()
                ended.put((case, nursery.run(case.suite, case.test, limit)))
        except queue.Empty:
            pass
        except BaseException as error:
            ended.put(error)
        finally:
            nursery.close()

    for number in range(jobs):
        threading.Thread(target=work, args=(logs / str(number),), daemon=True).start()
    for _ in cases:
        result = ended.get()
        if isinstance(result, BaseException):
            raise result
        yield result


def is_right(case: Case, outcome: Outcome, implementation: str) -> bool:
    if case.difference is not None and implementation == "telegrad":
        return outcome.status == "failed" and case.difference[0] in outcome.detail
    return outcome.status == "passed"


def print_table(results: Results, implementation: str) -> None:
    passed: Counter[tuple[str, str]] = Counter()
    run: Counter[tuple[str, str]] = Counter()
    for case, outcome in results:
        for suite in (case.suite, "all"):
            run[suite, case.kind] += 1
            passed[suite, case.kind] += outcome.status == "passed"
    suites = [*dict.fromkeys(case.suite for case, _ in results), "all"]
    print(f"\n{implementation:32}" + "".join(f"{kind:>13}" for kind in RUN_KINDS))
    for suite in suites:
        cells = [
            f"{passed[suite, kind]}/{run[suite, kind]}" if run[suite, kind] else ""
            for kind in RUN_KINDS
        ]
        print(f"{suite:32}" + "".join(f"{cell:>13}" for cell in cells))


def print_left_out() -> None:
    count = Counter(case.kind for case in all_cases())
    print("not run: " + ", ".join(f"{count[kind]} {kind}" for kind in LEFT_OUT))


def run_once(cases: Sequence[Case], options: argparse.Namespace, logs: Path) -> int:
    """Run and report; how many cases did not go as they should."""
    implementation = "stock" if options.stock else "telegrad"
    results: Results = []
    started = time.monotonic()
    for case, outcome in run_cases(cases, implementation, options.limit, options.jobs, logs):
        results.append((case, outcome))
        if options.verbose or outcome.status != "passed":
            note = f"  {outcome.reason}" if outcome.status != "passed" else ""
            print(f"{outcome.status:8}{outcome.seconds:6.1f} s  {case}{note}", flush=True)
    print_table(results, implementation)
    wrong = 0
    for case, outcome in results:
        if case.difference is not None and implementation == "telegrad":
            print(f"differs as it should: {case}. {case.difference[1]}")
        if not is_right(case, outcome, implementation):
            wrong += 1
            print(f"WRONG: {case} {outcome.status}. Log: {logs}")
    print_left_out()
    print(f"{len(results)} cases, {wrong} wrong, {time.monotonic() - started:.0f} s", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--stock", action="store_true", help="run stock torch instead")
    parser.add_argument("-k", default="", metavar="REGEX", help="only cases that match")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds that a case may take")
    parser.add_argument("--repeat", type=int, default=1, help="so many runs in a row")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--logs", type=Path, help="where logs of failed cases go")
    parser.add_argument("-v", "--verbose", action="store_true", help="show passed cases, too")
    options = parser.parse_args()
    cases = [case for case in cases_to_run() if re.search(options.k, str(case))]
    if not cases:
        parser.error(f"no case matches {options.k!r}")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="conformance-"))
    return 1 if sum(run_once(cases, options, logs / str(n)) for n in range(options.repeat)) else 0


if __name__ == "__main__":
    sys.exit(main())
