"""`telegrad.run` with real calls."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import telegrad
from telegrad import rpc
from telegrad.launch.errors import LaunchError
from tests.scripts import run_script

SCRIPT = """
import dataclasses, os, sys
import telegrad
from telegrad import rpc

@dataclasses.dataclass
class Answer:
    value: int
    pid: int

def answer(value):
    return Answer(value + 1, os.getpid())

def main():
    got = rpc.rpc_sync("worker1", answer, args=(41,))
    assert type(got) is Answer and got.value == 42 and got.pid != os.getpid()
    again = rpc.rpc_sync("worker2", pass_on, args=(answer, 1))
    assert type(again) is Answer and again.value == 2
    print("workers", len(rpc.get_worker_infos()), sys.argv[1:])

def pass_on(function, value):
    return rpc.rpc_sync("worker1", function, args=(value,))

if __name__ == "__main__":
    telegrad.run(main)
"""


def call_everyone(names: list[str]) -> int:
    futures = [rpc.rpc_async(name, os.getpid) for name in names]
    return len({future.wait() for future in futures})


def test_functions_and_classes_of_the_script_are_known_to_workers(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    done = run_script("-m", "telegrad", "run", path, "-w", "2", "--x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "workers 3 ['--x']"


OPTIMIZES = """
import sys
import telegrad
import telegrad.optim

def knows_dynamo():
    return "torch._dynamo" in sys.modules

def main():
    print(knows_dynamo(), telegrad.rpc.rpc_sync("worker1", knows_dynamo))

if __name__ == "__main__":
    telegrad.run(main, workers=1)
"""


def test_what_the_first_optimizer_imports_is_imported_once_for_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(OPTIMIZES)
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"], "main itself makes no torch optimizer"


def test_an_error_in_a_remote_call_reaches_the_caller_of_run() -> None:
    def main() -> None:
        rpc.rpc_sync("ps", os.stat, args=("/nowhere/at/all",))

    with pytest.raises(FileNotFoundError, match="/nowhere/at/all"):
        telegrad.run(main, workers=["ps"])
    assert not rpc.is_initialized()


def test_run_inside_of_main_is_refused_and_the_job_goes_on() -> None:
    def main() -> int:
        with pytest.raises(LaunchError, match="a worker of a job already"):
            telegrad.run(os.getpid, workers=1)
        return int(rpc.rpc_sync("worker1", abs, args=(-3,)))

    assert telegrad.run(main, workers=1) == 3


def test_main_may_leave_the_job_by_itself() -> None:
    assert telegrad.run(lambda: rpc.shutdown(graceful=False), workers=0) is None


def test_run_can_be_called_again() -> None:
    for _ in range(2):
        assert telegrad.run(lambda: rpc.rpc_sync("worker1", abs, args=(-3,)), workers=1) == 3


def test_sixty_four_workers_call_all_to_all_and_shut_down() -> None:
    started = time.monotonic()

    def main() -> tuple[float, list[int]]:
        ready = time.monotonic() - started
        names = ["main", *(f"worker{number}" for number in range(1, 65))]
        futures = [rpc.rpc_async(name, call_everyone, args=(names,)) for name in names]
        return ready, [future.wait() for future in futures]

    ready, seen = telegrad.run(main, workers=64)
    print(f"ready after {ready:.1f} s, done after {time.monotonic() - started:.1f} s")
    assert seen == [65] * 65
