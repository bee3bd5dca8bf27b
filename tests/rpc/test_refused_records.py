"""What is refused after it was recorded by its sender: no backward pass waits for it.

The limits of autograd are lowered while the job runs, as on a worker that has not heard yet of what
others have released.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.autograd.context import Context
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.wire.frames import Kind
from tests.rpc import data_functions as functions
from tests.rpc.test_data_limits import attempt, call, contexts, service, wait_until
from tests.rpc.test_data_only import MakeJob, make_parties, send_meta  # noqa: F401 (a fixture)

WITHOUT_END = 40.0
"""Seconds. A pass that takes so long has waited for what never comes."""


def keep_at_most(kind: str, count: int) -> None:
    ledgers = {
        "records": service().container._records,
        "contexts": service().container._ledger,
        "passes": service()._passes,
    }
    ledger = ledgers[kind]
    assert ledger is not None
    ledger._most = count


def differentiate(context: int, root: torch.Tensor, x: torch.Tensor, **options: Any) -> str:
    """How the pass ended, and the gradient of `x`."""

    def work() -> list[float]:
        autograd.backward(context, [root], timeout=WITHOUT_END, **options)
        return autograd.get_gradients(context)[x].tolist()

    return attempt(work)


def go_on_after_a_refusal(to: str) -> tuple[str, str]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        left = call(to, functions.weigh, x)
        refused = attempt(lambda: call(to, functions.weigh, x * 2))
        return refused, differentiate(context, left, x)


def test_a_pass_does_without_a_call_that_was_not_recorded(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b")
    job["b"].do(keep_at_most, "records", 2)
    refused, passed = job["a"].do(go_on_after_a_refusal, "b")
    assert "worker 'b' keeps 2 records for worker 'a' and takes no more" in refused
    assert passed == "answered [1.0, 1.0, 1.0]"
    wait_until(job, "b", contexts, 0)


@telegrad.export
def keep_contexts() -> None:
    keep_at_most("contexts", 5)


def come_back_in_a_context(to: str) -> tuple[str, str]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        refused = attempt(lambda: call(to, functions.weigh, x * 2))
        with ThreadPoolExecutor(1) as outside:
            outside.submit(call, to, keep_contexts).result()
        left = call(to, functions.weigh, x)
        return refused, differentiate(context, left, x)


def test_a_pass_does_without_a_call_that_came_before_there_was_room_for_its_context(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b")
    job["b"].do(keep_at_most, "contexts", 0)
    refused, passed = job["a"].do(come_back_in_a_context, "b")
    assert "worker 'b' keeps 0 contexts for worker 'a' and takes no more" in refused
    assert passed == "answered [1.0, 1.0, 1.0]"


def send_what_cannot_be_read(to: str) -> tuple[str, str]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        left = call(to, functions.weigh, x)
        # It takes no bytes here, and too many when it is used there.
        refused = attempt(lambda: call(to, functions.weigh, x[:1].expand(1 << 20)))
        return refused, differentiate(context, left, x)


def test_a_pass_does_without_a_call_whose_tensors_cannot_be_read(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(message_bytes=1 << 20))
    refused, passed = job["a"].do(send_what_cannot_be_read, "b")
    assert "cannot read a call" in refused
    assert passed == "answered [1.0, 1.0, 1.0]"


def call_before_it_is_met(to: str, number: int) -> tuple[str, str]:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        with agent._connecting.setdefault(number, threading.Lock()):
            late = attempt(lambda: rpc.rpc_sync(to, functions.weigh, (x * 2,), timeout=0.1))
        left = call(to, functions.weigh, x)
        return late, differentiate(context, left, x)


def test_a_pass_does_without_a_call_that_never_left(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b")
    late, passed = job["a"].do(call_before_it_is_met, "b", 1)
    assert "timed out" in late
    assert passed == "answered [1.0, 1.0, 1.0]"


def refuse_an_answer_in_a_pass(to: str) -> tuple[str, str]:
    """The answer to a call is there, and is opened after the pass has begun here."""
    node = current_node()
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context, ThreadPoolExecutor(1) as beside:
        left = call(to, functions.weigh, x)
        pending = node.call(node.members.find(to), functions.weigh, (x * 2,), None)
        node.transport.wait(pending)
        keep_at_most("records", 0)
        passing = beside.submit(differentiate, context, left, x)
        await_begin(service().container.get(context))
        refused = attempt(lambda: node.outcome(pending))
        return refused, passing.result()


def await_begin(context: Context) -> None:
    while not context.passes.begun:
        threading.Event().wait(0.001)


def test_a_pass_that_has_begun_does_without_an_answer_that_is_refused(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b")
    refused, passed = job["a"].do(refuse_an_answer_in_a_pass, "b")
    assert "worker 'a' keeps 0 records for worker 'b' and takes no more" in refused
    assert passed == "answered [1.0, 1.0, 1.0]"
    wait_until(job, "b", contexts, 0)


def differentiate_through(via: str, to: str, create_graph: bool) -> str:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        root = call(via, functions.square_weight_there, to, x)
        return differentiate(context, root, x, create_graph=create_graph)


def test_a_pass_fails_where_a_gradient_that_is_recorded_is_refused(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", "c")
    job["c"].do(keep_at_most, "records", 2)
    told = job["a"].do(differentiate_through, "b", "c", True)
    assert "worker 'c' keeps 2 records for worker 'b' and takes no more" in told, told
    wait_until(job, "c", contexts, 0)
    assert job["a"].do(differentiate_through, "b", "c", False) == "answered [6.0, 6.0, 6.0]"


def test_a_pass_fails_where_a_worker_takes_part_in_no_more(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", "c")
    job["c"].do(keep_at_most, "passes", 0)
    told = job["a"].do(differentiate_through, "b", "c", False)
    assert "worker 'c' keeps 0 passes for worker 'b' and takes no more" in told, told


complaints: list[Any] = []


def hear_complaints() -> None:
    current_node().on_post("autograd.unread", lambda *said: complaints.append(said))


def complaints_heard() -> int:
    return len(complaints)


def post_what_cannot_be_read(to: str) -> None:
    send_meta(to, b"\xff", Kind.POST)
    call(to, functions.scale, 1)


def post_it_in_a_context(to: str) -> None:
    with autograd.context():
        call(to, functions.weigh, torch.ones(3, requires_grad=True))
        post_what_cannot_be_read(to)
        call(to, call_back, current_node().info.name)


@telegrad.export
def call_back(to: str) -> None:
    rpc.rpc_sync(to, functions.scale, args=(1,))


def test_only_who_shares_a_context_is_told_that_a_post_was_not_read(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    """Two whose limits let nothing through told each other so without end."""
    job = make_parties("a", "b")
    for name in ("a", "b"):
        job[name].do(hear_complaints)
    job["a"].do(post_what_cannot_be_read, "b")
    job["b"].do(call, "a", functions.scale, 1)
    assert job["a"].do(complaints_heard) == 0
    job["a"].do(post_it_in_a_context, "b")
    assert job["a"].do(complaints_heard) == 1


class Interrupted(Exception):
    pass


def interrupt(*_: object) -> None:
    raise Interrupted


def be_interrupted_when_it_is_too_late(to: str, number: int) -> tuple[int, int]:
    """The deadline of a call passes while its worker is being met, then a signal comes."""
    node = current_node()
    agent = node.transport
    assert isinstance(agent, Agent)
    signal.signal(signal.SIGUSR2, interrupt)

    def expire_and_interrupt() -> None:
        while not node.calls.expire(node.runtime.now() + 60):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    x = torch.ones(3, requires_grad=True)
    made = node.calls_made()
    with autograd.context() as context, ThreadPoolExecutor(1) as another:
        with agent._connecting.setdefault(number, threading.Lock()):
            done = another.submit(expire_and_interrupt)
            with pytest.raises(Interrupted):
                rpc.rpc_sync(to, functions.weigh, (x * 2,), timeout=50)
            done.result()
        return node.calls_made() - made, len(service().container.get(context).sends)


def test_a_call_that_is_interrupted_when_its_deadline_has_passed_leaves_nothing(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b")
    assert job["a"].do(be_interrupted_when_it_is_too_late, "b", 1) == (0, 0)
