"""Who reads a link: always one thread."""

from __future__ import annotations

from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.node import current_node
from tests.rpc.fleet import Process


def hand_over_for_a_turn_that_is_over() -> tuple[bool, bool]:
    """Do what the watch does when it saw a request run that has ended meanwhile."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    incoming = agent._incoming[0]
    leader = incoming._leader
    handed_over = incoming._hand_over(leader, incoming._turn - 2)
    return handed_over, incoming._leader is leader


def test_a_leader_that_has_ended_its_turn_keeps_reading(workers: dict[str, Process]) -> None:
    assert rpc.rpc_sync("worker1", hand_over_for_a_turn_that_is_over) == (False, True)
