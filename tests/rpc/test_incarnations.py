"""A worker that took the place of another: what its predecessor still says is refused."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from telegrad import rpc
from tests.rpc import functions
from tests.rpc.fleet import Job, Process, join

MakeJob = Callable[..., Job]


def call(to: Any, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args, timeout=30)


def hold(reference: object) -> None:
    functions.kept = reference


def give(to: str) -> None:
    """Have another worker hold a reference to a value of this one."""
    functions.kept = rpc.RRef([1])
    rpc.rpc_sync(to, hold, args=(functions.kept,))


def forks_when_settled() -> int:
    until = time.monotonic() + 10
    while forks := int(rpc.debug_info()["references"]["forks"]):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return forks


def test_what_a_replaced_worker_says_after_it_wakes_up_is_refused(
    make_job: MakeJob, start: Callable[[], Process]
) -> None:
    job = make_job("a", "b", "c", life=0, liveness=60.0)
    job["a"].do(call, "b", functions.nothing)
    job["b"].do(call, "a", functions.nothing)
    job["c"].do(give, "b")
    job["b"].signal(signal.SIGSTOP)
    new = start()
    new.do(join, "b", 1, 3, job.store.port, life=1, liveness=60.0)

    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    assert job["a"].do(call, "b", functions.set_event, "new") is None
    assert new.do(functions.wait_event, "new") == "new"
    assert job["c"].do(forks_when_settled) == 0

    job["b"].signal(signal.SIGCONT)
    with pytest.raises(rpc.WorkerLost, match="'a' is gone"):
        job["b"].do(call, "a", functions.set_event, "stale")
    with pytest.raises(rpc.WorkerLost, match="counts as gone"):
        job["b"].do(call, "c", functions.set_event, "stale")
    assert new.do(call, "a", functions.who_am_i) == "a"
    assert new.do(call, 2, functions.who_am_i) == "c"
    leaving = [process.begin(rpc.shutdown) for process in (job["a"], new, job["c"])]
    for each in leaving:
        each.result(30)


def test_ids_of_incarnations_differ_while_names_and_ranks_stay(
    make_job: MakeJob, start: Callable[[], Process]
) -> None:
    job = make_job("a", "b", life=0)
    for life in (1, 2):
        job["b"].kill()
        job.processes["b"] = start()
        job["b"].do(join, "b", 1, 2, job.store.port, life=life)
        assert job["a"].do(rpc.wait_for_worker, 1) == rpc.WorkerInfo("b", 1 + 2 * life)
        assert job["b"].do(call, 0, functions.who_am_i) == "a"
        infos = [rpc.WorkerInfo("a", 0), rpc.WorkerInfo("b", 1 + 2 * life)]
        assert job["a"].do(rpc.get_worker_infos) == infos
    job.close()
