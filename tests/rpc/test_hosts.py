"""Workers on different hosts: who is stopped, cut off or gone is noticed, who is busy is not."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from tests.netns import hosts
from tests.rpc import functions
from tests.rpc.fleet import Nursery
from tests.rpc.inside import agent, call, when_settled
from tests.rpc.spread import SpreadJob

LIVENESS = 2.0
# Beyond the window: one interval, the scheduler of a busy machine.
MARGIN = 2.0


@pytest.fixture
def spread(nursery: Nursery) -> Iterator[Callable[..., SpreadJob]]:
    jobs: list[SpreadJob] = []
    with hosts("a", "b", "c") as network:

        def make(**options: Any) -> SpreadJob:
            jobs.append(SpreadJob(nursery, network, **options))
            return jobs[-1]

        yield make
        for job in jobs:
            for process in job.processes.values():
                process.kill()


def call_until_lost(to: str, function: Any, *args: Any) -> tuple[str, float]:
    try:
        rpc.rpc_sync(to, function, args=args, timeout=60)
    except rpc.WorkerLost as error:
        return f"{error.worker}: {error.cause}", time.monotonic()
    raise AssertionError("the call was answered")


def heard_of(*names: str) -> bool:
    """Whether the companions of these have answered."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    until = time.monotonic() + 20
    workers = [rpc.get_worker_info(name).id for name in names]
    while not all(agent.lookout.hears(worker) for worker in workers):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def compute_in_c(seconds: float) -> float:
    """One call after the other, each of which holds the interpreter's lock all the time.

    How long one takes changes with what else the machine has to do.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    started = time.monotonic()
    try:
        while time.monotonic() - started < seconds:
            sum(range(10_000_000))
    finally:
        sys.setswitchinterval(interval)
    return time.monotonic() - started


def begin_waiting(job: SpreadJob) -> Any:
    assert job["a"].do(heard_of, "b", "c")
    waiting = job["a"].begin(call_until_lost, "b", functions.announce_and_wait, "begun", "never")
    job["c"].do(call, "b", functions.wait_event, "begun")
    return waiting


def test_a_host_that_is_cut_off_is_noticed_within_the_window(
    spread: Callable[..., SpreadJob],
) -> None:
    job = spread(liveness=LIVENESS)
    waiting = begin_waiting(job)
    job.network.cut_off("b")
    cut = time.monotonic()
    message, failed = waiting.result(30)
    assert message.startswith("b: ")
    assert failed - cut < LIVENESS + MARGIN
    assert job["a"].do(call, "c", functions.who_am_i) == "c"


def test_a_worker_that_is_stopped_on_another_host_is_noticed_within_the_window(
    spread: Callable[..., SpreadJob],
) -> None:
    job = spread(liveness=LIVENESS)
    waiting = begin_waiting(job)
    job["b"].signal(signal.SIGSTOP)
    stopped = time.monotonic()
    message, failed = waiting.result(30)
    # Another worker may have noticed it first, and told.
    assert message.startswith(f"b: its process has been stopped for {LIVENESS:g} s")
    assert failed - stopped < LIVENESS + MARGIN


def test_a_worker_that_is_killed_on_another_host_is_noticed_at_once(
    spread: Callable[..., SpreadJob],
) -> None:
    job = spread(liveness=60.0)
    waiting = begin_waiting(job)
    job["b"].kill()
    killed = time.monotonic()
    message, failed = waiting.result(30)
    assert message.startswith("b: ")
    assert failed - killed < 1.0 + MARGIN


@pytest.mark.parametrize("busy", ["a", "b"])
def test_a_worker_that_computes_in_c_for_longer_than_the_window_is_not_lost(
    spread: Callable[..., SpreadJob], busy: str
) -> None:
    job = spread(liveness=3.0)
    assert job["a"].do(heard_of, "b", "c")
    assert job["b"].do(heard_of, "a", "c")
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    assert job["b"].do(call, "a", functions.who_am_i) == "a"
    assert job[busy].do(compute_in_c, 6.0) > 4.0
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    for name in "abc":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}


def kill_companion() -> int:
    companion = agent()._meeting._companion
    assert companion is not None
    os.kill(companion.pid, signal.SIGKILL)
    return companion.pid


def companion_after(killed: int) -> bool:
    """Whether there is another one."""
    companion = agent()._meeting._companion
    assert companion is not None
    return when_settled(lambda: companion.pid != killed and not companion.has_ended)


def test_a_worker_whose_companion_is_killed_is_not_lost(spread: Callable[..., SpreadJob]) -> None:
    job = spread(liveness=LIVENESS)
    assert job["a"].do(heard_of, "b", "c")
    for _ in range(2):
        killed = job["b"].do(kill_companion)
        # What is tested is that this much time passes in which nothing else is heard.
        job["a"].do(call, "b", time.sleep, 2 * LIVENESS)
        assert job["b"].do(companion_after, killed)
    for name in "abc":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}
    job["b"].signal(signal.SIGSTOP)
    message, _ = job["a"].do(call_until_lost, "b", functions.who_am_i)
    assert message.startswith(f"b: its process has been stopped for {LIVENESS:g} s")


def losses() -> dict[str, str]:
    return dict(rpc.debug_info()["lost workers"])


def losses_when(count: int) -> dict[str, str]:
    until = time.monotonic() + 20
    while len(losses()) < count and time.monotonic() < until:
        time.sleep(0.02)
    return losses()


def all_hear_all(job: SpreadJob) -> None:
    for one in "abc":
        assert job[one].do(heard_of, *(other for other in "abc" if other != one))


def keep_own(names: list[str]) -> None:
    functions.kept = rpc.RRef([1])
    for name in names:
        rpc.rpc_sync(name, hold, args=(functions.kept,))


def hold(reference: Any) -> None:
    functions.record(reference)


def forks_left(count: int) -> int:
    until = time.monotonic() + 20
    while rpc.debug_info()["references"]["forks"] > count and time.monotonic() < until:
        time.sleep(0.02)
    return int(rpc.debug_info()["references"]["forks"])


def test_two_workers_that_lose_each_other_agree_with_all_on_who_goes(
    spread: Callable[..., SpreadJob],
) -> None:
    job = spread(liveness=LIVENESS)
    all_hear_all(job)
    job["a"].do(keep_own, ["b", "c"])
    waiting = [
        job["a"].begin(call_until_lost, "b", functions.announce_and_wait, "begun", "never"),
        job["b"].begin(call_until_lost, "a", functions.announce_and_wait, "begun", "never"),
    ]
    for name in "ab":
        job["c"].do(call, name, functions.wait_event, "begun")
    job.network.cut("a", "b")
    for each in waiting:
        each.result(30)
    assert list(job["a"].do(losses_when, 1)) == ["b"]
    assert list(job["c"].do(losses_when, 1)) == ["b"]
    assert sorted(job["b"].do(losses_when, 2)) == ["a", "c"]
    assert job["a"].do(forks_left, 1) == 1
    assert job["a"].do(call, "c", functions.who_am_i) == "c"
    with pytest.raises(rpc.WorkerLost, match="'c' is gone"):
        job["b"].do(call, "c", functions.who_am_i)


def test_the_smaller_part_of_a_job_leaves_when_it_is_cut_off(
    spread: Callable[..., SpreadJob],
) -> None:
    job = spread(liveness=LIVENESS)
    all_hear_all(job)
    job.network.cut_off("a")
    assert list(job["b"].do(losses_when, 1)) == ["a"]
    assert list(job["c"].do(losses_when, 1)) == ["a"]
    found = job["a"].do(losses_when, 2)
    assert sorted(found) == ["b", "c"]
    assert any("cut off" in reason for reason in found.values())
    job.network.join("a")
    with pytest.raises(rpc.WorkerLost):
        job["a"].do(call, "b", functions.who_am_i)
    assert job["b"].do(call, "c", functions.who_am_i) == "c"
