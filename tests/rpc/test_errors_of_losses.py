"""What those who depended on a lost worker are told."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import call, hold_remote, when_settled

MakeJob = Callable[..., Job]


def facts_of_loss(to: str) -> tuple[str, str, str]:
    try:
        rpc.rpc_sync(to, functions.announce_and_wait, args=("begun", "never"))
    except rpc.WorkerLost as error:
        again = pickle.loads(pickle.dumps(error))
        return again.worker, again.cause, again.pending
    raise AssertionError("the call was answered")


def test_the_error_of_a_loss_has_worker_cause_and_what_was_pending(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    waiting = job["a"].begin(facts_of_loss, "b")
    job["c"].do(call, "b", functions.wait_event, "begun")
    job["b"].kill()
    worker, cause, pending = waiting.result(30)
    assert worker == "b"
    assert "process" in cause
    assert "announce_and_wait" in pending


def facts_of_lost_value() -> tuple[str, str, bool]:
    try:
        functions.kept.to_here()
    except rpc.WorkerLost as error:
        return error.worker, error.pending, isinstance(error, rpc.ReferenceLost)
    raise AssertionError("a lost value was given")


def test_a_value_that_died_with_its_owner_is_a_loss_of_that_worker(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(hold_remote, "b")
    job["b"].kill()
    assert job["a"].do(lost_workers_when_known) == ["b"]
    assert job["a"].do(facts_of_lost_value) == ("b", "to_here() of a value that it owns", True)


def lost_workers_when_known() -> list[str]:
    when_settled(lambda: bool(rpc.debug_info()["lost workers"]))
    return list(rpc.debug_info()["lost workers"])


def errors_of_references_to_lost(to: str) -> list[str]:
    """A reference that is to go to a lost worker, and one to a value that it should make."""
    rpc.on_worker_lost(lambda worker, reason: functions.set_event("told"))
    with pytest.raises(rpc.WorkerLost):
        rpc.rpc_sync(to, die_here)
    functions.wait_event("told")
    told = []
    for begin, args in ((rpc.rpc_sync, (rpc.RRef(1),)), (rpc.remote, ())):
        with pytest.raises(rpc.WorkerLost) as caught:
            begin(to, functions.echo_all, args=args)
        told += [caught.value.worker, str(caught.value)]
    return told


def die_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_errors_of_references_to_a_lost_worker_name_it(make_job: MakeJob) -> None:
    job = make_job("a", "bertha")
    told = job["a"].do(errors_of_references_to_lost, "bertha")
    assert all("bertha" in words for words in told), told


def call_on_loss(to: str) -> None:
    def fail(worker: rpc.WorkerInfo, reason: str) -> None:
        raise LookupError("in a callback")

    def call_another(worker: rpc.WorkerInfo, reason: str) -> None:
        functions.record((worker.name, rpc.rpc_sync(to, functions.who_am_i)))

    rpc.on_worker_lost(fail)
    rpc.on_worker_lost(call_another)


def test_callbacks_on_a_loss_may_call_and_may_fail(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(call, "b", functions.nothing)
    job["a"].do(call_on_loss, "c")
    job["b"].kill()
    assert job["a"].do(recorded_when_there) == [("b", "c")]
    assert "in a callback" in job["a"].end()


def recorded_when_there() -> list[Any]:
    when_settled(lambda: bool(functions.recorded))
    return functions.take_recorded()


def refusals() -> list[str]:
    """What is said to one who gives no time, or nothing that can be called."""
    made = rpc.RRef(1)
    said = []
    for ask in (
        lambda: rpc.wait_for_worker(0, timeout=-1),
        lambda: rpc.wait_for_worker(0, timeout=float("nan")),
        lambda: rpc.shutdown(timeout=-1),
        lambda: rpc.shutdown(timeout="soon"),  # type: ignore[arg-type]
        lambda: made.to_here(timeout=float("nan")),
        lambda: autograd.backward(1, [], timeout=float("nan")),
        lambda: rpc.on_worker_lost("print"),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            ask()
        said.append(str(caught.value))
    return said


def test_what_is_no_time_or_no_callback_is_refused_at_once(make_job: MakeJob) -> None:
    """Below zero, or no number at all, would be no bound: a wait for ever."""
    said = make_job("a")["a"].do(refusals)
    assert [each.split(":")[0] for each in said] == [
        "timeout=-1",
        "timeout=nan",
        "timeout=-1",
        "timeout='soon' is a str",
        "timeout=nan",
        "timeout=nan",
        "'print' cannot be called",
    ]


def load_into_lost(to: str) -> str:
    module = RemoteModule(to, nn.Linear, (2, 2))
    parent = nn.Sequential(module)
    state = parent.state_dict()
    with pytest.raises(rpc.WorkerLost):
        rpc.rpc_sync(to, die_here)
    with pytest.raises(rpc.WorkerLost) as caught:
        parent.load_state_dict(state)
    return str(caught.value.worker)


def test_a_state_for_a_module_of_a_lost_worker_is_a_loss_too(make_job: MakeJob) -> None:
    """Torch gathers the RuntimeErrors of children in one of its own, which names nobody."""
    assert make_job("a", "b")["a"].do(load_into_lost, "b") == "b"
