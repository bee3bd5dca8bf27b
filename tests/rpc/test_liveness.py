"""Workers that die, stop, or are merely busy."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from telegrad import rpc
from telegrad.rpc import vitals
from telegrad.rpc.current import current_node
from telegrad.rpc.lookout import UNMET_PER_LOOK
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent

MakeJob = Callable[..., Job]

SEED = 20261116
MARGIN = 15.0
"""Seconds that a machine with much else to do may add."""


def call_and_time(worker: str) -> tuple[str, float]:
    """Call something that never returns; what the loss of its worker says, and when."""
    begun = time.monotonic()
    with pytest.raises(rpc.WorkerLost) as caught:
        rpc.rpc_sync(worker, functions.wait_event, args=("never",), timeout=30)
    return str(caught.value), time.monotonic() - begun


def compute_without_a_pause(numbers: int = 80_000_000) -> float:
    """One call of C code that holds the interpreter all the time."""
    begun = time.monotonic()
    sum(range(numbers))
    return time.monotonic() - begun


def test_a_stopped_worker_is_lost_within_the_liveness_time(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=1.0)
    job["a"].do(rpc.rpc_sync, "b", functions.nothing)
    waiting = job["a"].begin(call_and_time, "b")
    job["b"].signal(signal.SIGSTOP)
    message, taken = waiting.result(40)
    assert taken < 1.0 + MARGIN
    assert "'b'" in message
    assert "stopped for 1 s" in message
    assert "wait_event" in message


def test_a_busy_interpreter_is_not_lost(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=1.0)
    taken = job["a"].do(rpc.rpc_sync, "b", compute_without_a_pause)
    assert taken > 1.0, "it was not busy for longer than the liveness time"
    assert job["a"].do(rpc.rpc_sync, "b", functions.echo, ("well",)) == "well"


@pytest.mark.slow
def test_a_worker_that_computes_for_a_minute_in_c_is_not_lost(make_job: MakeJob) -> None:
    """With the time after which silence is death as it is by default: 5 s."""
    job = make_job("a", "b")
    pace = job["b"].do(compute_without_a_pause) / 80_000_000
    numbers = int(75 / pace)
    call = job["a"].begin(rpc.rpc_sync, "b", compute_without_a_pause, args=(numbers,), timeout=300)
    taken = call.result(300)
    assert taken > 60, f"it was busy for {taken:.0f} s only"
    for name, other in (("a", "b"), ("b", "a")):
        assert job[name].do(rpc.rpc_sync, other, functions.echo, ("well",)) == "well"
        assert job[name].do(rpc.debug_info)["lost workers"] == {}


def test_a_killed_worker_is_lost_at_once_for_all_its_peers(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", liveness=60.0)
    for name in ("a", "c"):
        job[name].do(rpc.rpc_sync, "b", functions.nothing)
    waiting = [job[name].begin(call_and_time, "b") for name in ("a", "c")]
    job["b"].kill()
    killed = time.monotonic()
    for each in waiting:
        message, _ = each.result(40)
        assert "'b'" in message
    assert time.monotonic() - killed < 25
    assert job["a"].do(rpc.rpc_sync, "c", functions.echo, ("still",)) == "still"


def await_look_at_a_stopped_worker() -> None:
    """Return when this worker has seen that another one is stopped."""
    lookout = current_node().transport.lookout
    while not lookout._stopped_since:
        time.sleep(0.01)


def test_workers_that_were_stopped_and_continued_together_lose_nobody(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=1.0)
    job["a"].do(rpc.rpc_sync, "b", functions.nothing)
    job["b"].signal(signal.SIGSTOP)
    job["a"].do(await_look_at_a_stopped_worker)
    job["a"].signal(signal.SIGSTOP)
    time.sleep(1.5)  # Longer than the liveness time, which is what this is about.
    job["a"].signal(signal.SIGCONT)
    job["a"].do(await_look_at_a_stopped_worker)
    job["b"].signal(signal.SIGCONT)
    assert job["a"].do(rpc.rpc_sync, "b", functions.echo, ("well",)) == "well"


def call_in_turn(names: list[str], times: int) -> dict[str, str]:
    for _ in range(times):
        for name in names:
            assert rpc.rpc_sync(name, functions.who_am_i, timeout=60) == name
    return dict(rpc.debug_info()["lost workers"])


def test_a_job_that_is_stopped_and_continued_again_and_again_loses_nobody(
    make_job: MakeJob,
) -> None:
    """Short stops, and some beyond the time after which a worker that is stopped alone is lost."""
    names = ["a", "b", "c"]
    job = make_job(*names, liveness=1.0)
    draw = random.Random(SEED)
    calling = job["a"].begin(call_in_turn, names, 6000)
    for stop in [*(draw.uniform(0.01, 0.1) for _ in range(12)), 1.5, 0.02, 1.2]:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for name in draw.sample(names, len(names)):
                job[name].signal(number)
            # What is tested is that this much time passes.
            time.sleep(stop if number is signal.SIGSTOP else draw.uniform(0.001, 0.1))
    assert calling.result(60) == {}


def reads_of_one_look() -> int:
    """How many processes one look after the others asks the kernel about in full."""
    count = 0
    read = vitals._read
    own = threading.get_ident()

    def counting(pid: int) -> list[bytes] | None:
        nonlocal count
        count += threading.get_ident() == own  # The worker's own thread may look just now, too.
        return read(pid)

    vitals._read = counting
    try:
        lookout = agent().lookout
        lookout._look_at_processes()
        lookout._listen_for_signs()
    finally:
        vitals._read = read
    return count


def lost_within(worker: str, seconds: float) -> bool:
    """Whether this worker takes that one for lost, now or within that time."""
    node = current_node()
    number = rpc.get_worker_info(worker).id
    until = time.monotonic() + seconds
    while not node.is_lost(number) and time.monotonic() < until:
        time.sleep(0.02)
    return node.is_lost(number)


def test_workers_that_never_met_look_after_each_other_at_a_cost_that_does_not_grow(
    make_job: MakeJob,
) -> None:
    """Each looks closely at a few. All together see one that is stopped, and one that is gone."""
    names = "abcdefgh"
    job = make_job(*names, liveness=1.0)
    assert job["a"].do(reads_of_one_look) <= UNMET_PER_LOOK < len(names) - 1
    job["h"].signal(signal.SIGSTOP)
    rest = [job[name].begin(lost_within, "h", 1.0 + MARGIN) for name in names[:-1]]
    assert all(known.result(40) for known in rest)
    job["g"].kill()
    rest = [job[name].begin(lost_within, "g", MARGIN) for name in names[:-2]]
    assert all(known.result(40) for known in rest)


def test_a_process_that_ended_is_gone_though_its_parent_took_no_note() -> None:
    """Workers that never met look closely at a few of each other only: they would miss it."""
    ended = subprocess.Popen(["sleep", "600"])
    process = vitals.Process.own()
    seen = vitals.Process(ended.pid, process.born, process.namespace)
    assert not seen.is_gone()
    assert not process.is_gone()
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert seen.is_gone()
    ended.wait()
    assert seen.is_gone()
    assert not vitals.Process(ended.pid, process.born, "pid:[1]").is_gone()
