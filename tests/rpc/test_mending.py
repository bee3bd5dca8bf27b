"""Connections that are cut under traffic: mended, with nothing lost and nothing done twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.wire.frames import Kind
from telegrad.wire.link import Link
from telegrad.wire.stream import Part, PlainStream
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import call

MakeJob = Callable[..., Job]
UNIX: dict[str, Any] = {"liveness": 20.0}
TCP: dict[str, Any] = {**UNIX, "host": "127.0.0.1", "transports": ("tcp",)}
TRANSPORTS = [pytest.param(UNIX, id="unix"), pytest.param(TCP, id="tcp")]
SEED = 20261116


def cut_links(side: str) -> int:
    """Break every connection of this worker on one of its sides."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    ends = agent._outgoing if side == "outgoing" else agent._incoming
    links = [end.link for end in list(ends.values()) if hasattr(end, "link")]
    for link in links:
        link.mark_broken()
    return len(links)


def be_clumsy(seed: int, chance: float) -> None:
    """From now on this process cuts connections in the middle of what it sends."""
    numbers = random.Random(seed)
    send_all = PlainStream.try_send
    functions.record("clumsy")

    def send_some(self: PlainStream, parts: Any) -> int:
        if numbers.random() >= chance:
            return send_all(self, parts)
        first: Part = parts[0]
        view = memoryview(first).cast("B")
        send_all(self, [view[: numbers.randrange(len(view) + 1)]])
        self.close()
        raise ConnectionResetError("cut by the test")

    PlainStream.try_send = send_some  # type: ignore[method-assign]
    functions.kept = send_all


def be_careful() -> None:
    PlainStream.try_send = functions.kept  # type: ignore[method-assign]
    functions.take_recorded()


def echo_once(number: int, value: Any) -> Any:
    functions.record(number)
    return value


def make_traffic(to: str, threads: int, calls: int, largest: int, seed: int) -> list[int]:
    """Calls of all sizes from many threads, half of them as futures; the numbers of all."""

    def one_thread(thread: int) -> None:
        numbers = random.Random(seed * 1000 + thread)
        futures = []
        for n in range(calls):
            number = thread * calls + n
            x = torch.full((numbers.randrange(largest),), number)
            if numbers.random() < 0.5:
                assert torch.equal(rpc.rpc_sync(to, echo_once, args=(number, x)), x)
            else:
                futures.append((x, rpc.rpc_async(to, echo_once, args=(number, x))))
        for x, future in futures:
            assert torch.equal(future.wait(), x)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one_thread, range(threads)))
    return list(range(threads * calls))


@pytest.mark.parametrize("options", TRANSPORTS)
@pytest.mark.parametrize("side", ["outgoing", "incoming"])
def test_a_broken_connection_is_mended_for_idle_and_for_waiting_calls(
    make_job: MakeJob, options: dict[str, Any], side: str
) -> None:
    job = make_job("a", "b", "c", **options)
    breaks = job["a"] if side == "outgoing" else job["b"]
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    for number in range(3):
        breaks.do(cut_links, side)
        assert job["a"].do(call, "b", functions.who_am_i) == "b"
        name = f"event {number}"
        waiting = job["a"].begin(call, "b", functions.announce_and_wait, "begun " + name, name)
        job["c"].do(call, "b", functions.wait_event, "begun " + name)
        if side == "incoming":
            breaks.do(cut_links, side)
        job["c"].do(call, "b", functions.set_event, name)
        assert waiting.result(60) == name
    assert job["a"].do(rpc.debug_info)["lost workers"] == {}


def call_while_cutting(to: str, calls: int) -> int:
    """The main thread waits for calls while another one breaks the links below it."""
    done = threading.Event()
    cuts = 0

    def cut_often() -> None:
        nonlocal cuts
        while not done.wait(0.02):
            cuts += cut_links("outgoing")

    cutter = threading.Thread(target=cut_often)
    cutter.start()
    try:
        for n in range(calls):
            assert rpc.rpc_sync(to, echo_once, args=(n, n)) == n
            time.sleep(0.001)
    finally:
        done.set()
        cutter.join()
    return cuts


@pytest.mark.parametrize("options", TRANSPORTS)
def test_calls_go_on_while_their_connection_is_cut_again_and_again(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", **options)
    job["b"].do(functions.take_recorded)
    assert job["a"].do(call_while_cutting, "b", 300) > 3
    assert job["b"].do(functions.take_recorded) == list(range(300))


@pytest.mark.parametrize("options", TRANSPORTS)
@pytest.mark.parametrize("clumsy", ["a", "b"])
def test_traffic_cut_at_random_bytes_loses_nothing_and_doubles_nothing(
    make_job: MakeJob, options: dict[str, Any], clumsy: str
) -> None:
    print(f"seed {SEED}")
    job = make_job("a", "b", **options)
    job["a"].do(call, "b", functions.nothing)
    job[clumsy].do(be_clumsy, SEED, 0.03)
    numbers = job["a"].begin(make_traffic, "b", 6, 40, 60_000, SEED).result(60)
    job[clumsy].do(be_careful) if clumsy == "a" else None
    done = job["b"].do(functions.take_recorded)
    assert sorted(n for n in done if n != "clumsy") == numbers
    assert job["a"].do(rpc.debug_info)["lost workers"] == {}
    assert job["a"].do(rpc.debug_info)["calls in flight"] == []


def futures_with_callbacks(to: str, count: int) -> int:
    """Large futures whose callbacks call again, while the link is full."""
    told = []
    x = torch.ones(200_000)

    def again(future: torch.futures.Future[Any]) -> Any:
        told.append(int(rpc.rpc_sync(to, torch.sum, args=(future.wait(),))))

    futures = [rpc.rpc_async(to, functions.echo, args=(x,)).then(again) for _ in range(count)]
    for future in futures:
        future.wait()
    assert set(told) == {200_000}
    return len(told)


@pytest.mark.parametrize("options", TRANSPORTS)
def test_callbacks_that_call_while_the_link_is_full_wait_for_nobody(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", **options)
    assert job["a"].do(futures_with_callbacks, "b", 60) == 60


def both_send_large(to: str, count: int) -> bool:
    x = torch.arange(300_000)
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: rpc.rpc_sync(to, functions.echo, args=(x,)), range(count))
        return all(torch.equal(result, x) for result in results)


@pytest.mark.parametrize("options", TRANSPORTS)
def test_two_workers_that_send_large_tensors_to_each_other_at_once_do_not_wait_for_ever(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", **options)
    both = [job["a"].begin(both_send_large, "b", 40), job["b"].begin(both_send_large, "a", 40)]
    assert all(each.result(60) for each in both)


def send_large_and_cut(to: str) -> bool:
    """The connection is cut while a frame waits for room in it."""
    x = torch.arange(8 << 20)
    timer = threading.Timer(0.02, cut_links, ["outgoing"])
    timer.start()
    answer = rpc.rpc_sync(to, functions.echo, args=(x,))
    timer.join()
    return torch.equal(answer, x)


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_connection_cut_under_a_blocked_writer_is_mended(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", **options)
    for _ in range(3):
        assert job["a"].do(send_large_and_cut, "b")


def largest_of(value: Any) -> int:
    return int(np.frombuffer(value, np.uint8).max())


def send_and_change(to: str, value: Any) -> int:
    """What the callee finds in what is changed while its connection is mended."""
    cut_links("outgoing")
    pending = rpc.rpc_async(to, largest_of, args=(value,))
    np.frombuffer(value, np.uint8)[:] = 7
    largest: int = pending.wait()
    return largest


def change_results_while_mending() -> None:
    """From now on the connection breaks before each result, which is changed when it has left."""
    send = Link.send

    def send_broken(self: Link, kind: Kind, *args: Any, **options: Any) -> None:
        if kind is Kind.REPLY:
            self.mark_broken()
        send(self, kind, *args, **options)
        if kind is Kind.REPLY:
            functions.kept[:] = 7

    Link.send = send_broken  # type: ignore[method-assign]


def give_array(size: int) -> Any:
    functions.kept = np.ones(size, np.uint8)
    return functions.kept


@pytest.mark.parametrize("kind", [np.array, bytearray])
def test_what_is_changed_while_its_connection_is_mended_arrives_as_it_was_sent(
    make_job: MakeJob, kind: Callable[[Any], Any]
) -> None:
    job = make_job("a", "b", **TCP)
    job["a"].do(call, "b", functions.nothing)
    for size in (200_000, 6_000_000):
        assert job["a"].do(send_and_change, "b", kind(np.ones(size, np.uint8))) == 1
    job["b"].do(change_results_while_mending)
    assert largest_of(job["a"].do(call, "b", give_array, 200_000)) == 1
    assert job["a"].do(rpc.debug_info)["lost workers"] == {}


def hold_visitors() -> None:
    """From now on this worker takes its time between the handshake and the making of a link."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    welcome, admit = agent.visitors._welcome, agent.visitors._admit

    def hold(visitor: Any) -> None:
        functions.wait_event("visitors may enter")
        welcome(visitor)

    def announce(session: list[str], hello: Any) -> Any:
        functions.set_event(f"asks for {hello.purpose}")
        return admit(session, hello)

    agent.visitors._welcome = hold  # type: ignore[method-assign]
    agent.visitors._admit = announce  # type: ignore[method-assign]


def cut_before_the_link_is_made(to: str) -> str:
    pending = rpc.rpc_async(to, functions.who_am_i)
    assert cut_links("outgoing") == 1
    name: str = pending.wait()
    return name


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_connection_that_is_cut_before_the_callee_has_made_its_link_is_mended(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", **options)
    job["b"].do(hold_visitors)
    called = job["a"].begin(cut_before_the_link_is_made, "b")
    job["b"].do(functions.wait_event, "asks for resume")
    job["b"].do(functions.set_event, "visitors may enter")
    assert called.result(30) == "b"
