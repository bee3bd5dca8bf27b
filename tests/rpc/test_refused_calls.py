"""`trust="data"`: a call that is one too many is not run, and leaves nothing behind either."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from tests.rpc import data_functions as functions
from tests.rpc.fleet import Job
from tests.rpc.test_data_limits import attempt, call, contexts, references, wait_until
from tests.rpc.test_data_only import MakeJob, make_parties  # noqa: F401 (a fixture)

SIZE = 20_000


@pytest.fixture(
    params=[rpc.Limits(calls_in_flight=1), rpc.Limits(bytes_in_flight=3 * SIZE)],
    ids=["calls", "bytes"],
)
def job(request: Any, make_parties: MakeJob) -> Job:  # noqa: F811
    return make_parties("a", "b", "c", limits=request.param)


def occupy(to: str) -> str:
    """A call that runs on there, and leaves no room for another that is heavy."""
    heavy = torch.zeros(3 * SIZE - 1000, dtype=torch.uint8)
    return attempt(lambda: rpc.rpc_sync(to, functions.weigh_and_wait, (heavy,), timeout=0.5))


def give_references(to: str, mine: list[Any]) -> list[str]:
    heavy = torch.zeros(SIZE)
    told = []
    for rref in mine:
        told.append(attempt(lambda: call(to, functions.take, heavy, rref)))  # noqa: B023
        made = rpc.remote(to, functions.take, args=(heavy, rref))
        told.append(attempt(made.to_here))
    return told


def be_refused_with_references(to: str, other: str) -> list[str]:
    mine = [rpc.RRef(1), *(call(each, functions.give_reference, 1) for each in (to, other))]
    assert "timed out" in occupy(to)
    return give_references(to, mine)


def test_references_in_a_call_that_is_refused_are_let_go(job: Job) -> None:
    told = job["a"].do(be_refused_with_references, "b", "c")
    assert all("takes no more" in each for each in told), told
    job["b"].do(functions.open_gate)
    for name in "abc":
        wait_until(job, name, references, {})


def be_refused_in_a_context(to: str) -> tuple[str, str, list[float]]:
    x = torch.ones(SIZE, requires_grad=True)
    with autograd.context() as context:
        left = call(to, functions.weigh, x[:3])
        assert "timed out" in occupy(to)
        refused = attempt(lambda: call(to, functions.weigh, x * 2))
        passed = attempt(lambda: autograd.backward(context, [left]))
        return refused, passed, autograd.get_gradients(context)[x][:4].tolist()


def test_a_pass_does_not_wait_for_what_was_refused(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b", limits=rpc.Limits(bytes_in_flight=3 * SIZE))
    refused, passed, gradient = job["a"].do(be_refused_in_a_context, "b")
    assert "takes no more" in refused
    assert passed == "answered None"
    assert gradient == [1, 1, 1, 0]
    job["b"].do(functions.open_gate)
    wait_until(job, "b", contexts, 0)
