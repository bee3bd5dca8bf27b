"""What must not hang, leak or spread when one thing goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent, call, hold_remote, references, when_settled

MakeJob = Callable[..., Job]


def deadline_of_call(to: str, timeout: float) -> float:
    started = time.monotonic()
    with pytest.raises(rpc.CallTimeout):
        rpc.rpc_sync(to, functions.nothing, timeout=timeout)
    return time.monotonic() - started


def test_a_deadline_holds_while_a_worker_that_does_not_answer_is_being_met(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", "c", liveness=60.0)
    job["b"].signal(signal.SIGSTOP)
    assert 0.5 <= job["a"].do(deadline_of_call, "b", 0.5) < 3.0
    assert job["a"].do(call, "c", functions.who_am_i) == "c"
    job["b"].signal(signal.SIGCONT)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def keep_two(others: Any, own: Any) -> None:
    functions.kept = [others, own]


def share_both(owner: str, to: str) -> None:
    """Pass on a value of a worker that does not answer, and one of this worker."""
    rpc.rpc_async(to, keep_two, args=(functions.kept, rpc.RRef(torch.ones(1))), timeout=0)


def keep_own(own: Any) -> None:
    functions.kept = own


def share_own(to: str) -> None:
    rpc.rpc_sync(to, keep_own, args=(rpc.RRef(torch.ones(1)),))


def forget_kept() -> None:
    functions.kept = None
    gc.collect()


def test_references_do_not_wait_behind_a_worker_that_does_not_answer(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", liveness=60.0)
    job["c"].do(hold_remote, "b")
    job["b"].signal(signal.SIGSTOP)
    job["c"].do(share_both, "b", "a")
    job["c"].do(share_own, "a")
    forks = job["c"].do(references)["forks"]
    job["a"].do(forget_kept)
    assert when_settled(lambda: job["c"].do(references)["forks"] == forks - 1, 5.0)
    job["b"].signal(signal.SIGCONT)


def break_the_watch() -> float:
    """A notice that fails, again and again; then a deadline that only the watch can see."""
    reading, writing = os.pipe()
    os.write(writing, b"x")

    def fail(events: int) -> None:
        if functions.record("notice") > 2:
            agent().watch.forget(reading)
        raise LookupError("in the watch")

    agent().watch.register(reading, fail, 1)
    assert when_settled(lambda: len(functions.recorded) > 2)
    future = rpc.rpc_async("b", functions.wait_event, args=("never",), timeout=0.3)
    started = time.monotonic()
    assert when_settled(future.done)
    return time.monotonic() - started


def test_the_watch_survives_an_error(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(break_the_watch) < 5.0
    assert "in the watch" in job["a"].end()


class EndsItsReader:
    """Rebuilding it wants to end the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return end_process, ()


def end_process() -> None:
    raise SystemExit(3)


def give_what_ends_its_reader() -> EndsItsReader:
    return EndsItsReader()


def read_what_ends_its_reader(to: str) -> str:
    with pytest.raises(rpc.RemoteError, match="cannot be read") as caught:
        rpc.rpc_sync(to, give_what_ends_its_reader)
    with pytest.raises(rpc.RemoteError, match="cannot be read"):
        rpc.rpc_async(to, give_what_ends_its_reader).wait()
    return str(caught.value)


def test_a_result_whose_rebuilding_ends_the_process_is_an_error(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert "give_what_ends_its_reader" in job["a"].do(read_what_ends_its_reader, "b")
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def wrong_arguments(to: str) -> None:
    for begin in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match="args is a int"):
            begin(to, torch.add, args=1)
        with pytest.raises(TypeError, match="args is a str"):
            begin(to, torch.add, args="ab")
        with pytest.raises(TypeError, match="kwargs is a list"):
            begin(to, torch.add, kwargs=[("alpha", 1)])


def test_arguments_that_are_no_arguments_are_refused_before_anything_leaves(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b")
    job["a"].do(wrong_arguments, "b")
    assert job["a"].do(rpc.debug_info)["links"]["outgoing links"] == 0


class Slow:
    def __init__(self) -> None:
        functions.wait_event("make it")

    def answer(self) -> int:
        return 42


def ask_in_vain(to: str, times: int) -> None:
    functions.kept = rpc.remote(to, Slow)
    for _ in range(times):
        future = functions.kept.rpc_async(timeout=0.05).answer()
        with pytest.raises(rpc.CallTimeout):
            future.wait()


def ask_and_make(to: str) -> int:
    future = functions.kept.rpc_async().answer()
    rpc.rpc_sync(to, functions.set_event, args=("make it",))
    return int(future.wait())


def test_methods_of_a_value_that_does_not_come_hold_no_thread(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    before = job["b"].do(threading.active_count)
    job["a"].do(ask_in_vain, "b", 30)
    assert job["b"].do(threading.active_count) < before + 10
    assert job["a"].do(ask_and_make, "b") == 42
