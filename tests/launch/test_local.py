"""Local jobs: workers start, serve and end with main, whatever way main ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy
import pytest
import torch
from torch.distributed import DistNetworkError

import telegrad
from telegrad.launch import store
from telegrad.launch.errors import LaunchError
from telegrad.launch.job import Conduct
from telegrad.launch.local import run_with
from telegrad.launch.options import Options, worker_names
from tests.launch import conducts

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def run(
    main: Callable[[], T],
    workers: int = 2,
    *,
    conduct: Conduct = conducts.STORE,
    seed: int | None = None,
    timeout: float = 60.0,
    threads: int = 1,
    env: dict[str, str] | None = None,
) -> T:
    options = Options(worker_names(workers), env or {}, threads, seed, timeout)
    return run_with(conduct, main, options)


def all_facts(workers: int) -> list[dict[str, object]]:
    return [conducts.facts(rank) for rank in range(workers + 1)]


def is_running(pid: object) -> bool:
    assert isinstance(pid, int)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # Gone before, or while it was read.
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def places_where_processes_are_seen(pids: list[object]) -> bytes:
    """Command lines and environments."""
    files = (Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ"))
    return b"".join(file.read_bytes() for file in files)


def test_the_key_of_a_job_is_on_no_command_line_and_in_no_environment() -> None:
    def main() -> tuple[bytes, bytes]:
        pids = [os.getpid(), *(fact["pid"] for fact in all_facts(1)), *forkservers()]
        return places_where_processes_are_seen(pids), conducts.key_of_main()

    seen, key = run(main, 1)
    assert len(key) == 32
    assert key not in seen
    assert key.hex().encode() not in seen


def forkservers() -> list[object]:
    """The children of this process."""
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in task.read_text().split()]


def test_main_runs_here_and_its_result_is_returned() -> None:
    facts = run(lambda: all_facts(2))
    assert [fact["name"] for fact in facts] == ["main", "worker1", "worker2"]
    assert facts[0]["pid"] == os.getpid()
    assert len({fact["pid"] for fact in facts}) == 3


def test_no_process_is_left_after_main_returned() -> None:
    before = set(_children_of(os.getpid()))
    facts = run(lambda: all_facts(2))
    assert not any(is_running(fact["pid"]) for fact in facts[1:])
    assert set(_children_of(os.getpid())) <= before


def test_an_error_in_main_is_raised_and_ends_the_workers_at_once() -> None:
    pids: list[object] = []

    def main() -> None:
        pids.extend(fact["pid"] for fact in all_facts(2)[1:])
        raise LookupError("in main")

    with pytest.raises(LookupError, match="in main"):
        run(main)
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def test_workers_that_ignore_the_request_to_end_are_killed() -> None:
    pids: list[object] = []

    def main() -> None:
        pids.extend(fact["pid"] for fact in all_facts(2)[1:])
        raise LookupError

    with pytest.raises(LookupError):
        run(main, conduct=conducts.STUBBORN)
    assert not any(is_running(pid) for pid in pids)


def test_a_worker_that_raises_at_start_is_named_with_its_traceback() -> None:
    with pytest.raises(LaunchError, match=r"(?s)worker2.*exit code 1.*no such data set"):
        run(lambda: None, conduct=conducts.RAISING)


def test_a_worker_that_crashes_at_start_is_named_with_its_signal() -> None:
    with pytest.raises(LaunchError, match=r"worker2.*SIGABRT"):
        run(lambda: None, conduct=conducts.ABORTING)


def test_workers_that_never_join_are_given_up_after_the_timeout() -> None:
    with pytest.raises(LaunchError, match="did not all join within 4 s"):
        run(lambda: None, conduct=conducts.ABSENT, timeout=4.0)


def test_an_error_in_main_tells_which_worker_was_lost_before() -> None:
    def main() -> None:
        pid = conducts.facts(1)["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid], 30.0)
        raise ConnectionError("worker1 does not answer")

    with pytest.raises(ConnectionError) as caught:
        run(main)
    assert any("worker1" in note and "SIGKILL" in note for note in caught.value.__notes__)


def test_workers_compute_and_differentiate_after_the_fork() -> None:
    run(lambda: None, conduct=conducts.COMPUTING, threads=2)


def test_workers_have_the_threads_and_the_environment_that_were_asked_for() -> None:
    facts = run(lambda: all_facts(1), 1, threads=2, env={"TELEGRAD_TEST": "yes"})
    assert facts[1]["threads"] == 2
    assert facts[1]["environment"] == "yes"
    assert "TELEGRAD_TEST" not in os.environ


def test_random_numbers_differ_between_workers_and_repeat_with_a_seed() -> None:
    first = [fact["random"] for fact in run(lambda: all_facts(2), seed=7)]
    second = [fact["random"] for fact in run(lambda: all_facts(2), seed=7)]
    assert first == second
    for kind in range(3):
        assert len({str(numbers[kind]) for numbers in first}) == 3  # type: ignore[index]


def test_sixty_four_workers_start_and_end_in_seconds() -> None:
    started = time.monotonic()
    facts = run(lambda: all_facts(64), 64)
    assert len({fact["pid"] for fact in facts}) == 65
    assert time.monotonic() - started < 60


def _children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


SCRIPT = """
import os, sys, time
from telegrad.launch.local import run_with
from telegrad.launch.options import Options, worker_names
from tests.launch import conducts

{top}

def main():
    print(" ".join(str(conducts.facts(rank)["pid"]) for rank in range(3)), flush=True)
    {body}

{guard}
    run_with(conducts.STORE, main, Options(worker_names(2)))
"""
GUARD = 'if __name__ == "__main__":'


class StartScript(Protocol):
    def __call__(
        self, *, body: str = "pass", top: str = "", guard: str = GUARD
    ) -> subprocess.Popen[str]: ...


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[StartScript]:
    """Start a job as a script of its own; none outlives its test."""
    scripts: list[subprocess.Popen[str]] = []

    def start(*, body: str = "pass", top: str = "", guard: str = GUARD) -> subprocess.Popen[str]:
        path = tmp_path / "job.py"
        path.write_text(SCRIPT.format(body=body, top=top, guard=guard))
        script = subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        scripts.append(script)
        return script

    yield start
    for script in scripts:
        script.kill()
        script.communicate()


def read_pids(script: subprocess.Popen[str]) -> list[int]:
    assert script.stdout is not None
    return [int(word) for word in script.stdout.readline().split()]


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.01)


def test_interrupt_ends_main_and_workers(start_script: StartScript) -> None:
    script = start_script(body="time.sleep(600)")
    pids = read_pids(script)
    assert len(pids) == 3
    script.send_signal(signal.SIGINT)
    wait_until_gone(pids[1:], 30.0)
    _, err = script.communicate(timeout=30)
    assert script.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_when_the_caller_is_killed(
    start_script: StartScript, number: signal.Signals
) -> None:
    script = start_script(body="time.sleep(600)")
    pids = read_pids(script)
    servers = _children_of(pids[0])
    assert len(servers) == 1
    script.send_signal(number)
    script.communicate(timeout=30)
    wait_until_gone([*pids[1:], *servers], 30.0)


def test_workers_end_when_the_fork_server_is_killed(start_script: StartScript) -> None:
    script = start_script(body="time.sleep(600)")
    pids = read_pids(script)
    os.kill(_children_of(pids[0])[0], signal.SIGKILL)
    wait_until_gone(pids[1:], 30.0)


def test_a_script_that_starts_threads_when_imported_still_gets_workers(
    start_script: StartScript,
) -> None:
    top = "import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    script = start_script(top=top)
    out, err = script.communicate(timeout=120)
    assert script.returncode == 0, err
    assert len(out.split()) == 3


def test_a_script_without_guard_is_told_so(start_script: StartScript) -> None:
    script = start_script(guard="if True:")
    _, err = script.communicate(timeout=120)
    assert script.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in err
    assert "frame #0" not in err, "torch must not tell its own story first"


FORKS = """
    child = os.fork()
    if child == 0:
        {end}
    os.waitpid(child, 0)
    assert all(os.path.exists(f"/proc/{{conducts.facts(rank)['pid']}}") for rank in (1, 2))
    print("workers are left")
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise LookupError", "return"])
def test_a_process_that_main_forks_ends_and_leaves_the_workers_alone(
    start_script: StartScript, end: str
) -> None:
    script = start_script(body=FORKS.strip().format(end=end))
    out, err = script.communicate(timeout=120)
    assert script.returncode == 0, err
    assert "workers are left" in out


def test_workers_end_with_the_caller_though_a_process_that_it_forked_goes_on(
    start_script: StartScript,
) -> None:
    body = "print(child := os.fork() or time.sleep(600), flush=True); time.sleep(600)"
    script = start_script(body=body)
    pids = read_pids(script)
    servers = _children_of(pids[0])
    child = read_pids(script)
    try:
        servers = [pid for pid in servers if pid not in child]
        script.kill()
        wait_until_gone([*pids[1:], *servers], 30.0)
    finally:
        os.kill(child[0], signal.SIGKILL)


def test_names_of_workers() -> None:
    assert worker_names(2) == ("worker1", "worker2")
    assert worker_names(["ps", "trainer"]) == ("ps", "trainer")
    with pytest.raises(ValueError, match="given twice"):
        worker_names(["ps", "ps"])
    with pytest.raises(ValueError, match="'main'"):
        worker_names(["main"])
    with pytest.raises(ValueError, match="0 or more"):
        worker_names(-1)
    with pytest.raises(TypeError, match="one string"):
        worker_names("ps")


@pytest.mark.parametrize("number", [numpy.int64(2), torch.tensor(2)])
def test_any_whole_number_is_a_number_of_workers(number: Any) -> None:
    assert worker_names(number) == ("worker1", "worker2")


def test_a_store_that_does_not_answer_in_time_is_an_error_of_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise DistNetworkError("The client socket has timed out\nframe #0: ...")

    monkeypatch.setattr(store, "TCPStore", refuse)
    words = r"within 0.01 s \(The client socket has timed out\): pass a longer timeout="
    with pytest.raises(LaunchError, match=words):
        store.visit_store(1, 0.01)


def test_of_two_threads_that_start_a_job_one_is_told_of_the_other() -> None:
    inside, told = threading.Event(), threading.Event()

    def main() -> bool:
        inside.set()
        return told.wait(30)

    results: list[bool] = []
    first = threading.Thread(target=lambda: results.append(telegrad.run(main, workers=0)))
    first.start()
    assert inside.wait(30)
    try:
        with pytest.raises(LaunchError, match=r"a telegrad\.run is under way") as caught:
            telegrad.run(int, workers=0)
    finally:
        told.set()
        first.join()
    assert "shutdown" not in str(caught.value)
    assert results == [True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"main": 3}, "main=3 cannot be called"),
        ({"workers": True}, "workers=True is a bool: give a number or a list"),
        ({"workers": 1.5}, "workers=1.5 is a float: give a number or a list"),
        ({"workers": ["a b"]}, "name must match .*'a b'"),
        ({"workers": [1, 2]}, "name must be a string, but got 1"),
        ({"threads_per_worker": 0}, "threads_per_worker=0: .* at least 1"),
        ({"timeout": -1}, "timeout=-1: .* greater than 0"),
        ({"timeout": float("inf")}, "timeout=inf: .* and at most 9223372036"),
        ({"liveness": 1e12}, "liveness=1000000000000.0: .* and at most 9223372036"),
        ({"seed": 2**64 - 1}, "seed=18446744073709551615: .* the last seed \\+ 1"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809: torch takes seeds from -2\\*\\*63"),
        ({"env": {"A=B": "1"}}, "env has 'A=B', which cannot be"),
        ({"env": {"A": "1\0"}}, "env has 'A', which cannot be"),
        ({"liveness": -1}, "liveness=-1: .* greater than 0"),
        ({"seed": "x"}, "seed='x' is a str: give a whole number"),
        ({"env": {"A": 1}}, "env={'A': 1}: give names and values as strings"),
        ({"env": ["A=1"]}, "env is a list: give a dict"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_a_process_starts(
    options: dict[str, Any], words: str
) -> None:
    before = forkservers()
    with pytest.raises((ValueError, TypeError), match=words):
        telegrad.run(**({"main": int, "workers": 1} | options))
    assert forkservers() == before


def test_a_script_that_keeps_its_own_number_of_workers_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TELEGRAD_WORKERS", "3")
    with pytest.warns(UserWarning, match=r"was given 3 workers, but the script says workers=0"):
        telegrad.run(int, workers=0)


def test_the_number_of_workers_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_WORKERS", "3")
    assert len(worker_names(None)) == 3
    monkeypatch.delenv("TELEGRAD_WORKERS")
    with pytest.raises(ValueError, match="telegrad run SCRIPT --workers N"):
        worker_names(None)
