"""Jobs over TCP in the clear, whose large tensors travel by two connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc import meeting
from telegrad.rpc.errors import CallTimeout, WorkerLost
from telegrad.wire import lane
from telegrad.wire.address import TcpAddress, UnixAddress
from telegrad.wire.handshake import ClientHandshake, HandshakeError, Hello
from telegrad.wire.keys import new_key
from telegrad.wire.link import Link
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent
from tests.rpc.test_mending import be_careful, be_clumsy, both_send_large, make_traffic

MakeJob = Callable[..., Job]
TCP: dict[str, Any] = {"host": "127.0.0.1", "transports": ("tcp",), "liveness": 20.0}
SEED = 20261117
THRESHOLD = 1 << 18


def link_to(to: str) -> Link:
    return agent()._outgoing[rpc.get_worker_info(to).id].link  # type: ignore[union-attr]


def smaller_tensors_are_large() -> None:
    lane.THRESHOLD = THRESHOLD


def echo_there(to: str, *sizes: int) -> bool:
    for size in sizes:
        x = torch.arange(size, dtype=torch.uint8)
        if not torch.equal(rpc.rpc_sync(to, functions.echo, args=(x,)), x):
            return False
    return True


def get_lane(to: str) -> str:
    """Send large tensors until there is a lane, as there is soon. The name of the connection."""
    deadline = time.monotonic() + 30
    assert echo_there(to, 2 * THRESHOLD)
    while (found := link_to(to)._lane) is None or not found.is_ready:
        assert echo_there(to, 2 * THRESHOLD)
        assert time.monotonic() < deadline, "no lane was opened"
    return link_to(to).name


def has_lane(to: str) -> bool:
    return link_to(to)._lane is not None


def gradients(to: str) -> bool:
    x = torch.randn(THRESHOLD, requires_grad=True)
    w = torch.randn(THRESHOLD, requires_grad=True)
    with autograd.context() as context:
        there = rpc.rpc_sync(to, torch.mul, args=(x, w))
        autograd.backward(context, [there.sin().sum()])
        found = autograd.get_gradients(context)
    (x * w).sin().sum().backward()
    return torch.allclose(found[x], x.grad) and torch.allclose(found[w], w.grad)  # type: ignore[arg-type]


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    made = make_job("a", "b", **TCP)
    for name in ("a", "b"):
        made[name].do(smaller_tensors_are_large)
    return made


def test_the_first_large_tensor_opens_a_lane_and_small_ones_do_not(job: Job) -> None:
    assert job["a"].do(echo_there, "b", 1, 1000, THRESHOLD - 1)
    assert not job["a"].do(has_lane, "b")
    job["a"].do(get_lane, "b")
    assert job["a"].do(echo_there, "b", 1, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, 5_000_000)
    assert job["b"].do(echo_there, "a", 1, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, 5_000_000)
    assert job["a"].do(gradients, "b")
    job.close()


def test_two_workers_that_send_large_tensors_to_each_other_at_once_do_not_wait_for_ever(
    job: Job,
) -> None:
    job["a"].do(get_lane, "b")
    both = [job["a"].begin(both_send_large, "b", 40), job["b"].begin(both_send_large, "a", 40)]
    assert all(each.result(60) for each in both)


@pytest.mark.parametrize("clumsy", ["a", "b"])
def test_traffic_cut_at_random_bytes_loses_nothing_and_doubles_nothing(
    job: Job, clumsy: str
) -> None:
    print(f"seed {SEED}")
    job["a"].do(get_lane, "b")
    job[clumsy].do(be_clumsy, SEED, 0.02)
    numbers = job["a"].begin(make_traffic, "b", 6, 30, 100_000, SEED).result(60)
    job[clumsy].do(be_careful) if clumsy == "a" else None
    done = job["b"].do(functions.take_recorded)
    assert sorted(n for n in done if n != "clumsy") == numbers
    assert job["a"].do(rpc.debug_info)["lost workers"] == {}
    assert job["a"].do(rpc.debug_info)["calls in flight"] == []


def stall_lane(to: str) -> None:
    """What comes by the lane is not read any more, as if nothing came."""
    found = link_to(to)._lane
    assert found is not None
    found._receive_all = lambda: None  # type: ignore[method-assign]


def error_of_echo(to: str, timeout: float) -> str:
    try:
        rpc.rpc_sync(to, functions.echo, args=(torch.ones(THRESHOLD),), timeout=timeout)
    except (CallTimeout, WorkerLost) as error:
        return type(error).__name__
    return "none"


def test_a_call_keeps_its_deadline_though_its_answer_is_half_here(job: Job) -> None:
    job["a"].do(get_lane, "b")
    job["a"].do(stall_lane, "b")
    assert job["a"].do(error_of_echo, "b", 0.5) == "CallTimeout"
    job["a"].do(cut_link, "b")
    assert job["a"].do(echo_there, "b", 2 * THRESHOLD), "and it goes on over another connection"


def cut_link(to: str) -> None:
    link_to(to).mark_broken()


def send_without_end(to: str) -> str:
    x = torch.ones(64 << 20, dtype=torch.uint8)
    functions.set_event("sending")
    try:
        while True:
            rpc.rpc_sync(to, functions.echo, args=(x,), timeout=60)
    except WorkerLost as error:
        return str(error)


def test_a_worker_that_dies_ends_what_is_on_its_way(job: Job) -> None:
    job["a"].do(get_lane, "b")
    sending = job["a"].begin(send_without_end, "b")
    job["b"].do(rpc.rpc_sync, "a", functions.wait_event, ("sending",))
    job["b"].kill()
    assert "'b'" in sending.result(30)


# Who may open one.


def ask_for_lane(to: str, name: str) -> str:
    """As a worker of the job, which has the key."""
    here = agent()
    member = here.node.members.member(rpc.get_worker_info(to).id)
    try:
        visit = meeting.meet(here._meeting, here.node.info, member, name, 0, "lane")
    except HandshakeError as error:
        return str(error)
    at_the_end = visit.stream.recv_into(memoryview(bytearray(1)))
    return "hung up" if at_the_end == 0 else "attached"


def test_a_lane_for_no_connection_or_a_second_one_is_turned_away(job: Job) -> None:
    name = job["a"].do(get_lane, "b")
    assert "has no such connection" in job["a"].do(ask_for_lane, "b", "")
    assert "has no such connection" in job["a"].do(ask_for_lane, "b", "0" * 64)
    assert job["a"].do(ask_for_lane, "b", name) == "hung up"
    job["a"].do(cut_link, "b")
    assert job["a"].do(echo_there, "b", 10)
    assert "has no such connection" in job["a"].do(ask_for_lane, "b", name), "it was an earlier one"
    assert job["a"].do(echo_there, "b", 3 * THRESHOLD)
    assert job["a"].do(rpc.debug_info)["lost workers"] == {}


def test_lanes_are_for_tcp_in_the_clear() -> None:
    """Elsewhere they gain nothing, and shared memory or a process group has no use for them."""
    key = new_key()
    hello = Hello("a", 0, 1, "job", "b", "s", 0, "2", meeting.PROTOCOL, "calls", 1)
    end = ClientHandshake(bytes(key), hello)
    end._openings = b"what both said"
    here = meeting.Meeting(key=key, job="job", incarnation=1, host="h")
    assert meeting._name(here, TcpAddress("127.0.0.1", 1), end) == end.name != ""
    assert meeting._name(here, TcpAddress("127.0.0.1", 1, tls=True), end) == ""
    assert meeting._name(here, UnixAddress("/nowhere"), end) == ""
    here.tensors = "gloo"
    assert meeting._name(here, TcpAddress("127.0.0.1", 1), end) == ""
