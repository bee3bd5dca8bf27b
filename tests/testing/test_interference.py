"""Messages of a real worker that are lost or late."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import CallTimeout
from telegrad.rpc.node import Node
from telegrad.testing import Delay, Lose, Message, MessageLost, interfere
from tests.rpc import functions

pytestmark = pytest.mark.usefixtures("workers")

LATE = 0.3


def add(to: str, **options: float) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1), **options)
    return result


def test_a_lost_call_ends_at_once_and_says_what_was_lost() -> None:
    with (
        interfere(Lose("call")),
        pytest.raises(MessageLost, match=r"call torch\.add to .*worker1"),
    ):
        add("worker1")


def test_a_lost_call_is_not_run() -> None:
    rpc.rpc_sync("worker1", functions.take_recorded)
    with interfere(Lose("call", times=1)):
        with pytest.raises(MessageLost):
            rpc.rpc_sync("worker1", functions.record, args=("lost",))
        rpc.rpc_sync("worker1", functions.record, args=("sent",))
    assert rpc.rpc_sync("worker1", functions.take_recorded) == ["sent"]


def test_a_lost_future_fails() -> None:
    with interfere(Lose("call")):
        future = rpc.rpc_async("worker1", torch.add, args=(1, 1))
    with pytest.raises(MessageLost):
        future.wait()


@pytest.mark.parametrize("owner", ["worker1", "main"])
def test_a_reference_whose_making_was_lost_says_so(owner: str) -> None:
    with interfere(Lose("remote")):
        rref = rpc.remote(owner, torch.add, args=(1, 1))
    with pytest.raises(MessageLost, match=r"RRef creation"):
        rref.to_here()


def test_a_function_chooses_what_is_lost() -> None:
    def chosen(message: Message) -> bool:
        return message.worker == "worker2" and message.kind == "fetch"

    with interfere(Lose(chosen)):
        here, there = (rpc.remote(name, torch.add, args=(1, 1)) for name in ("worker1", "worker2"))
        assert here.to_here() == 2
        with pytest.raises(MessageLost):
            there.to_here()
    assert there.to_here() == 2


def test_a_late_call_is_answered_late() -> None:
    started = time.monotonic()
    with interfere(Delay("call", LATE)):
        assert torch.equal(add("worker1"), torch.full((2,), 2.0))
    assert time.monotonic() - started >= LATE


def test_a_late_call_carries_what_its_tensors_were_when_it_was_made() -> None:
    x = torch.ones(2)
    with interfere(Delay("call", LATE)):
        future = rpc.rpc_async("worker1", torch.add, args=(x, 0))
        x.zero_()
        assert torch.equal(future.wait(), torch.ones(2))


def test_a_call_that_is_late_beyond_its_time_times_out_and_is_run_all_the_same() -> None:
    rpc.rpc_sync("worker1", functions.take_recorded)
    with (
        interfere(Delay("call", LATE)),
        pytest.raises(CallTimeout, match="RPC ran for more than"),
    ):
        rpc.rpc_sync("worker1", functions.record, args=("late",), timeout=LATE / 10)
    while not (recorded := rpc.rpc_sync("worker1", functions.take_recorded)):
        threading.Event().wait(LATE / 10)
    assert recorded == ["late"]


def test_own_messages_survive_the_connections_that_break_under_them() -> None:
    x = torch.ones(2, requires_grad=True)
    with interfere(Lose("own", times=5)):
        for _ in range(5):
            with autograd.context() as context:
                y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
                autograd.backward(context, [y.sum()])
                assert torch.equal(autograd.get_gradients(context)[x], torch.full((2,), 3.0))


def test_a_worker_that_is_not_interfered_with_is_as_ever() -> None:
    node = current_node()
    with interfere(Delay("call", 0.0)):
        assert type(node) is not Node
    assert type(node) is Node
    assert type(node.transport) is Agent


def test_rules_do_not_add_up() -> None:
    with interfere(), pytest.raises(RuntimeError, match="interfered with already"), interfere():
        pass


@pytest.mark.parametrize(
    ("rule", "problem"), [(lambda: Lose("calls"), "no kind"), (lambda: Delay("call", -1), "late")]
)
def test_a_rule_that_means_nothing_is_refused(rule, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rule()


def test_a_function_that_waits_for_a_reference_runs_when_the_reference_is_let_go() -> None:
    values = current_node().values
    with interfere(Delay("own", LATE)):
        passed = rpc.rpc_async("worker1", pass_on, args=("worker2", "main"), timeout=20)
        while not values.holds():
            threading.Event().wait(LATE / 30)
        values.release_all()
        assert passed.wait() == "worker2"


def pass_on(owner: str, to: str) -> str:
    reference = rpc.remote(owner, torch.add, args=(1, 1))
    name: str = rpc.rpc_sync(to, rpc.RRef.owner_name, args=(reference,))
    return name
