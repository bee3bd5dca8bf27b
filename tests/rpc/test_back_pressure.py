"""A receiver that is slow or does not read: what waits for it is bounded, and leaves nothing."""

from __future__ import annotations

import gc
import resource
import select
import signal
import time
from collections.abc import Callable

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import cargo, outgoing
from telegrad.rpc.current import current_node
from telegrad.wire.frames import Frame, Kind
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent, call, references, when_settled

MakeJob = Callable[..., Job]


def fill_link(to: str, room: int) -> None:
    outgoing.MAX_CALLS_IN_FLIGHT = room
    functions.kept = [
        rpc.rpc_async(to, functions.announce_and_wait, args=(f"f{n}", "go"), timeout=0)
        for n in range(room)
    ]


def references_after_calls_without_room(to: str) -> dict[str, int]:
    mine = rpc.RRef(torch.ones(2))
    with pytest.raises(rpc.CallTimeout):
        rpc.rpc_sync(to, functions.echo, args=(mine,), timeout=0.2)
    never = rpc.remote(to, functions.echo, args=(mine,), timeout=0.2)
    with pytest.raises(rpc.CallTimeout):
        never.to_here()
    del mine, never
    gc.collect()
    rpc.rpc_sync(rpc.get_worker_info(), functions.nothing)
    return references()


def empty_link(to: str) -> dict[str, int]:
    outgoing.MAX_CALLS_IN_FLIGHT = 8192
    rpc.rpc_sync(to, functions.set_event, args=("go",))
    for future in functions.kept:
        future.wait()
    functions.kept = None
    assert when_settled(lambda: not any(references().values())), references()
    return references()


def test_references_in_calls_that_found_no_room_are_taken_back(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(fill_link, "b", 4)
    job["c"].do(call, "b", functions.wait_event, "f3")
    left = job["a"].do(references_after_calls_without_room, "b")
    assert left["forks"] == 0
    assert not any(job["a"].do(empty_link, "b").values())


def flood(to: str, calls: int, size: int, most: int) -> tuple[int, int]:
    """Make large calls without waiting for any; the most bytes that were in flight at a time."""
    cargo.MOST = most
    futures, peak = [], 0
    x = torch.ones(size, dtype=torch.uint8)
    for number in range(calls):
        futures.append(rpc.rpc_async(to, take_slowly, args=(x,)))
        in_flight = len(rpc.debug_info()["calls in flight"])
        peak = max(peak, in_flight * size)
        if number == 0:
            assert in_flight == 1
    return peak, sum(future.wait() for future in futures)


def take_slowly(x: torch.Tensor) -> int:
    time.sleep(0.005)
    return len(x)


def peak_memory_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_fast_sender_to_a_slow_receiver_stays_within_the_stated_bytes(
    make_job: MakeJob, transport: str
) -> None:
    job = make_job("a", "b", host="127.0.0.1", transports=(transport,))
    size, most = 1 << 20, 8 << 20
    job["a"].do(flood, "b", 16, size, most)
    before = job["a"].do(peak_memory_kb), job["b"].do(peak_memory_kb)
    peak, taken = job["a"].do(flood, "b", 300, size, most)
    assert taken == 300 * size
    # What is counted may have been settled just before it was unloaded: two more at most.
    assert peak <= most + 2 * size
    after = job["a"].do(peak_memory_kb), job["b"].do(peak_memory_kb)
    for early, late in zip(before, after, strict=True):
        assert late - early < 8 * most // 1024


def one_call_beyond_all_bounds(to: str) -> int:
    cargo.MOST = 1000
    return int(rpc.rpc_sync(to, take_slowly, args=(torch.ones(100_000),)))


def test_one_call_may_be_larger_than_what_may_be_in_flight(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(one_call_beyond_all_bounds, "b") == 100_000


def send_until_full(to: str) -> None:
    """More than the system takes for a worker that does not read."""
    for _ in range(40):
        rpc.rpc_async(to, functions.nothing_with, args=(b"x" * 60_000,), timeout=0.05)


def timed_leave() -> float:
    started = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - started


def test_a_farewell_to_a_worker_that_does_not_read_holds_nobody_up(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=60.0)
    job["a"].do(call, "b", functions.nothing)
    job["b"].signal(signal.SIGSTOP)
    job["a"].do(send_until_full, "b")
    assert job["a"].do(timed_leave) < 20.0


def hear_posts() -> None:
    current_node().on_post("test", lambda sender, payload: None)


def kept_after_posts(to: str, count: int, size: int) -> tuple[int, int]:
    """The most frames that were kept for a resend, and bytes of memory that were lent, while this
    worker sent messages that have no reply."""
    node, worker = current_node(), rpc.get_worker_info(to).id
    x = torch.ones(size, dtype=torch.uint8)
    kept = 0
    for number in range(count):
        node.post(worker, "test", x)
        link = agent()._outgoing[worker].link
        kept = max(kept, link.session.kept_frames)
        if number % 100 == 99:
            select.select([link.stream], [], [], 0.1)  # A pace that the other keeps up with.
    assert link._arena is not None
    return kept, link._arena.use.high_water


def replies_read_by_a_post(to: str) -> int:
    """How many of those that come without a pause."""
    node, worker = current_node(), rpc.get_worker_info(to).id
    node.post(worker, "test", None)
    link = agent()._outgoing[worker].link
    read = 0

    def take_up() -> Frame | None:
        nonlocal read
        read += 1
        return Frame(Kind.REPLY, 0, b"", b"", []) if read < 1000 else None

    link.take_up = take_up
    node.post(worker, "test", torch.ones(outgoing.HEAVY))
    return read


def test_who_posts_is_not_held_up_by_the_replies_of_others(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["b"].do(hear_posts)
    assert job["a"].do(replies_read_by_a_post, "b") == 1


@pytest.mark.parametrize(("count", "size"), [(2000, 8), (1000, 1 << 17)])
def test_who_only_posts_gets_his_memory_back_meanwhile(
    make_job: MakeJob, count: int, size: int
) -> None:
    """Nobody waits for a reply, so nobody would read what was acknowledged and given back."""
    job = make_job("a", "b")
    job["b"].do(hear_posts)
    kept, lent = job["a"].do(kept_after_posts, "b", count, size)
    assert kept < count // 2
    assert lent < count * size // 2
