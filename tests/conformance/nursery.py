"""Runs cases one after the other, each in a session of processes of its own, with a time limit.

    python -m tests.conformance.nursery (stock | telegrad)

A nursery imports torch and the suites once. For each case it forks a leader, which forks the ranks.
A case that takes too long has the stacks of all its threads written to its log and is killed whole;
it costs only itself. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
STACKS = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case: "passed", "failed", "skipped", or "hung"."""

    suite: str
    test: str
    status: str
    seconds: float
    detail: str = ""

    @property
    def reason(self) -> str:
        """The line that says most: the last that names an error."""
        lines = [line.strip() for line in self.detail.splitlines() if line.strip()]
        named = [line for line in lines if "Error: " in line and "Process " not in line]
        return (named or lines or [""])[-1][:200]


class Nursery:
    """The process that runs the cases, as seen by who wants them run."""

    def __init__(self, implementation: str, directory: Path) -> None:
        path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        directory.mkdir(parents=True, exist_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES},
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            # The time limit is ours to keep; torch's own would only say less.
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "3600",
        }
        self._directory = directory
        with (directory / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.nursery", implementation],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=ROOT,
                text=True,
            )

    def run(self, suite: str, test: str, limit: float) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "suite": suite,
            "test": test,
            "limit": limit,
            "log": str(self._directory / f"{suite}.{test}.log"),
        }
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The nursery ended: see {self._directory / 'nursery.log'}")
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


_RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def main(implementation: str) -> None:
    from tests.conformance import suites

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.register(STACKS, all_threads=True)
    if implementation == "telegrad":
        suites.install_telegrad()
    suites.import_all()
    for line in sys.stdin:
        print(json.dumps(asdict(_run_apart(**json.loads(line)))), file=answers)


def _run_apart(suite: str, test: str, limit: float, log: str) -> Outcome:
    started = time.monotonic()
    reading, writing = os.pipe()
    leader = os.fork()
    if leader == 0:
        _lead(suite, test, log, writing)
    os.close(writing)
    ended = os.pidfd_open(leader)
    done, _, _ = select.select([ended], [], [], limit)
    if not done:
        _write_stacks(leader)
    # The leader is not reaped yet, so its number is still that of its session.
    _signal_session(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    os.close(ended)
    with os.fdopen(reading) as pipe:
        said = pipe.read() if done else ""
    seconds = round(time.monotonic() - started, 2)
    if not done:
        return Outcome(suite, test, "hung", seconds, f"No end after {limit:g} s: see {log}")
    if not said:
        return Outcome(suite, test, "failed", seconds, f"The leading process died: see {log}")
    status, detail = json.loads(said)
    if status in ("passed", "skipped"):
        os.unlink(log)
    return Outcome(suite, test, status, seconds, detail)


def _lead(suite: str, test: str, log: str, writing: int) -> None:
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        from tests.conformance import suites

        try:
            outcome = suites.run(suite, test)
        except BaseException:
            outcome = ("failed", traceback.format_exc())
        os.write(writing, json.dumps(outcome).encode())
    finally:
        os._exit(0)


def _write_stacks(leader: int) -> None:
    """One process after the other, or their lines would mix."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), STACKS)
                time.sleep(0.2)


def _signal_session(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


if __name__ == "__main__":
    main(sys.argv[1])
