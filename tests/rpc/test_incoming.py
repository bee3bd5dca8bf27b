"""Who reads a link: always one thread. And for whom answers are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad import rpc
from telegrad.rpc import incoming
from telegrad.rpc.agent import Agent
from telegrad.rpc.node import current_node
from telegrad.wire.session import Session
from tests.rpc import functions
from tests.rpc.fleet import Job, Process


def hand_over_for_a_turn_that_is_over() -> tuple[bool, bool]:
    """Do what the watch does when it saw a request run that has ended meanwhile."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    of_main = agent._incoming[0]
    leader = of_main._leader
    handed_over = of_main._hand_over(leader, of_main._turn - 2)
    return handed_over, of_main._leader is leader


def test_a_leader_that_has_ended_its_turn_keeps_reading(workers: dict[str, Process]) -> None:
    assert rpc.rpc_sync("worker1", hand_over_for_a_turn_that_is_over) == (False, True)


def never_acknowledge() -> None:
    Session.stamp = _stamped_without_acknowledgement
    Session.acknowledge = lambda session: 0


def _stamped_without_acknowledgement(session: Session[Any]) -> tuple[int, int]:
    session._sent += 1
    return session._sent, 0


def keep_few_answers() -> None:
    incoming.MOST_ANSWERS = incoming.FEW_ANSWERS + 36


def call_often(to: str, times: int) -> str:
    for number in range(times):
        try:
            rpc.rpc_sync(to, functions.nothing, timeout=20)
        except rpc.WorkerLost:
            return f"lost at call {number}"
    return "never lost"


def test_a_caller_that_never_acknowledges_is_sent_away(make_job: Callable[..., Job]) -> None:
    job = make_job("a", "b", "c")
    job["b"].do(keep_few_answers)
    job["a"].do(never_acknowledge)
    assert job["a"].do(call_often, "b", 300) == "lost at call 101"
    assert job["c"].do(call_often, "b", 300) == "never lost"
