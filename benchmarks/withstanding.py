"""One run, one table: load held, faults survived, bad inputs tried, and what was lost by it.

A job trains while its workers are killed, stopped and cut off; a soak holds a load under faults;
strangers without the key and members that lie attack running jobs. Then the same single faults
strike stock torch RPC and telegrad, side by side (`faults.py`).

    python -m benchmarks.withstanding --write      also puts the table into docs/faults.md
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time

import telegrad
from benchmarks import faults, pages
from tests.chaos import __main__ as chaos
from tests.chaos import soak as soaking
from tests.netns import why_not
from tests.rpc import liars, strangers
from tests.rpc.fleet import Nursery

PAGE = pages.DOCS / "faults.md"
WHERE = {"unix": "Unix sockets", "tcp": "TCP", "tls": "TLS"}
Row = tuple[str, str, str, str]


def train(steps: int, seed: int) -> Row:
    tally = chaos.run(steps, seed, liveness=2.0, seconds=600.0)
    struck = ", ".join(f"{count} {name}" for name, count in sorted(tally.struck.items()))
    ended = f"{tally.right} right, {sum(tally.errors.values())} with a named error"
    lost = f"{len(tally.wrong)} wrong, {len(tally.leaks)} things left behind"
    return f"training, {steps} steps", struck, ended, lost


def hold(calls: int, contexts: int, seed: int) -> Row:
    soak = soaking.Soak(calls, contexts, 600.0, seed)
    names = [soaking.STEADY, soaking.SHAKY]
    telegrad.run(lambda: soaking._work(soak), workers=names, restarts=1_000_000, liveness=2.0)
    soaking.judge(soak)
    done = {name: count for name, count in soak.done.items() if name not in ("calls", "contexts")}
    struck = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    failed = sum(soak.errors.values())
    ended = f"{failed} calls or passes with a named error, the rest right"
    lost = "; ".join(soak.problems) or "nothing; no growth"
    load = f"{soak.done['calls']:,} calls, {soak.done['contexts']:,} contexts"
    return load, struck, ended, lost


def refuse(nursery: Nursery, transport: str) -> Row:
    battery = strangers.Battery(nursery, transport)
    tries = sum(battery.check_refused(name, 0.5) for name in strangers.ATTACKS)
    battery.close()
    kinds = f"{tries:,} tries of {len(strangers.ATTACKS)} kinds"
    return f"a job over {WHERE[transport]}, strangers", kinds, "all refused", "nothing"


def withstand(nursery: Nursery, transport: str, count: int, seed: int) -> Row:
    battery = liars.Battery(nursery, transport)
    for number in range(count):
        battery.withstand(seed + number, 1.0)
    battery.check()
    battery.close()
    ended = f"{battery.done:,} pieces of work ended, those between the honest all right"
    load = f"a job of trust=data over {WHERE[transport]}, lying members"
    return load, f"{count} liars", ended, "nothing"


def compare() -> list[tuple[str, str, str]]:
    rows = []
    for fault in faults.FAULTS:
        reason = why_not() if fault.needs_hosts else None
        told = [reason or faults.observe(system, fault) for system in faults.SYSTEMS]
        rows.append((fault.name, *(each.replace("|", "/")[:110] for each in told)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.withstanding", description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--contexts", type=int, default=10_000)
    parser.add_argument("--liars", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbits(24))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        rows = [train(options.steps, options.seed)]
        rows.append(hold(options.calls, options.contexts, options.seed))
        nursery = Nursery()
        rows += [refuse(nursery, transport) for transport in WHERE]
        for transport in liars.TRANSPORTS:
            count = options.liars // len(liars.TRANSPORTS)
            rows.append(withstand(nursery, transport, count, options.seed))
        nursery.close()
        beside = compare()
    head = ("load", "faults and bad inputs", "how it ended", "lost or left")
    text = "\n\n".join(
        (
            f"Seed {options.seed}, {time.monotonic() - began:.0f} s:",
            pages.markdown(head, rows),
            "The same single faults, in the same run:",
            pages.markdown(("fault", *faults.SYSTEMS), beside),
        )
    )
    print(text)
    if options.write:
        pages.write_section("withstanding", text, PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
