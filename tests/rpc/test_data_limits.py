"""`trust="data"`: what one member can have another keep is bounded, member by member."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd.context import WORKER_SHIFT, working_in
from telegrad.autograd.messages import Begin, History, Options, encode
from telegrad.autograd.service import Autograd
from telegrad.rpc import incoming
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.wire import sending
from telegrad.wire.codec import pack
from telegrad.wire.frames import Kind
from telegrad.wire.session import Session
from tests.rpc import data_functions as functions
from tests.rpc.fleet import Job
from tests.rpc.inside import call
from tests.rpc.test_data_only import MakeJob, make_parties  # noqa: F401 (a fixture)

FEW = 5
A, B, C = range(3)


def attempt(work: Callable[[], Any]) -> str:
    try:
        return f"answered {work()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def service() -> Autograd:
    found: Autograd = current_node().services["autograd"]
    return found


def wait_until(job: Job, name: str, holds: Callable[[], Any], what: Any) -> None:
    until = time.monotonic() + 40
    while (now := job[name].do(holds)) != what:
        assert time.monotonic() < until, f"{name} has {now}, not {what}"


def references() -> dict[str, int]:
    gc.collect()
    info = rpc.debug_info()["references"]
    return {what: count for what, count in info.items() if count}


kept: list[Any] = []


def forget() -> None:
    kept.clear()
    gc.collect()


def take_references(to: str, count: int) -> list[str]:
    def take() -> None:
        kept.append(call(to, functions.give_reference, 1))

    return [attempt(take) for _ in range(count)]


def test_references_that_go_at_once_are_told_of_within_the_limit_on_a_message(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(metadata_bytes=1000))
    assert len({*job["a"].do(take_references, "b", 100)}) == 1
    job["a"].do(forget)
    wait_until(job, "b", references, {})


def make_values(to: str, count: int) -> list[str]:
    made = [rpc.remote(to, functions.Counter, args=(1,)) for _ in range(count)]
    kept.extend(made)
    return [attempt(partial(use, each)) for each in made]


def use(counter: rpc.RRef[functions.Counter]) -> int:
    return int(counter.rpc_sync().add(1))


WORDS = "worker 'b' keeps 5 references for worker 'a' and takes no more"


@pytest.mark.parametrize("get", [take_references, make_values], ids=["given", "made"])
def test_references_to_the_values_of_a_worker_are_limited(
    make_parties: MakeJob,  # noqa: F811
    get: Callable[[str, int], list[str]],
) -> None:
    job = make_parties("a", "b", "c", limits=rpc.Limits(references=FEW))
    told = job["a"].do(get, "b", FEW + 3)
    assert [WORDS in each for each in told] == [False] * FEW + [True] * 3, told
    assert "rpc.Limits.references" in told[-1]
    assert job["b"].do(references)["forks"] == FEW
    # Others are not held to account for it, and what is let go makes room.
    assert all("answered" in each for each in job["c"].do(get, "b", FEW))
    for name in "ac":
        job[name].do(forget)
    for name in "abc":
        wait_until(job, name, references, {})
    assert all("answered" in each for each in job["a"].do(get, "b", FEW))


def create_beyond(to: str, most: int, count: int) -> None:
    """Make values one after the other, and let go of each after `most` more."""
    window: list[Any] = []
    for _ in range(count):
        window.append(rpc.remote(to, functions.Counter, args=(1,)))
        del window[:-most]


def test_values_that_are_refused_while_others_go_leave_nothing(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    """That there is no such value may find the room that the value did not find."""
    job = make_parties("a", "b", limits=rpc.Limits(references=4 * FEW))
    job["a"].do(create_beyond, "b", 4 * FEW, 600)
    for name in "ab":
        wait_until(job, name, open_calls, 0)
        wait_until(job, name, references, {})


def open_calls() -> int:
    return current_node().calls.total()


def never_hold_back(to: str) -> None:
    """As an honest worker never does: send calls beyond the limit."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    outgoing: Any = agent._reach(current_node().members.find(to).id)
    outgoing._allowed = 1 << 30


def create_waiting(to: str, count: int) -> list[str]:
    never_hold_back(to)
    made = [rpc.remote(to, functions.wait_for_gate) for _ in range(count)]
    return [attempt(each.to_here) for each in made[FEW:]]


def test_values_whose_making_is_refused_for_the_calls_that_run_leave_nothing(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(calls_in_flight=FEW))
    told = job["a"].do(create_waiting, "b", 4 * FEW)
    assert all("rpc.Limits.calls_in_flight" in each for each in told), told
    job["b"].do(functions.open_gate)
    for name in "ab":
        wait_until(job, name, references, {})


def create_in_no_time(to: str) -> str:
    late = rpc.remote(to, functions.wait_for_gate, timeout=0.1)
    kept.append(late)
    wait_until_expired = attempt(lambda: rpc.rpc_sync(to, functions.wait_for_gate, timeout=0.3))
    assert "timed out" in wait_until_expired
    return attempt(late.to_here)


def test_a_value_that_is_made_too_late_is_kept_within_the_limit_and_let_go(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(references=1))
    assert "timed out" in job["a"].do(create_in_no_time, "b")
    assert job["b"].do(references)["forks"] == 1
    job["b"].do(functions.open_gate)
    job["a"].do(forget)
    for name in "ab":
        wait_until(job, name, references, {})


def pass_references(owner: str, to: str, count: int) -> list[str]:
    """Give references to values of one worker to another, which keeps them."""
    mine = [call(owner, functions.give_reference, n) for n in range(count)]
    return [attempt(partial(call, to, functions.take, each)) for each in mine]


def use_given() -> list[str]:
    return [attempt(partial(use, each)) for each in functions._given]


def test_a_reference_that_its_owner_keeps_for_nobody_more_says_so(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", "c", limits=rpc.Limits(references=2 * FEW))
    job["a"].do(take_references, "b", 2 * FEW - 2)
    # From c to a: b is told by a, for which it keeps two more.
    job["c"].do(pass_references, "b", "a", 4)
    told = job["a"].do(use_given)
    assert [each.startswith("answered") for each in told].count(True) == 2, told
    assert sum("worker 'b' keeps 10 references for worker 'a'" in each for each in told) == 2
    for name in "ac":
        job[name].do(functions.drop_all)
        job[name].do(forget)
    for name in "abc":
        wait_until(job, name, references, {})


def give_one_often(owner: str, to: str, count: int) -> list[str]:
    rref = call(owner, functions.give_reference, 1)
    return [attempt(partial(call, to, functions.take, rref)) for _ in range(count)]


def test_references_that_a_worker_gives_are_limited(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b", "c", limits=rpc.Limits(references=FEW))
    told = job["a"].do(give_one_often, "c", "b", FEW + 3)
    assert [WORDS in each for each in told] == [False] * FEW + [True] * 3, told
    assert job["b"].do(references)["held"] == FEW
    job["b"].do(functions.drop_all)
    for name in "abc":
        wait_until(job, name, references, {})


def contexts() -> int:
    return len(service().container)


def open_contexts(to: str, count: int) -> list[str]:
    told = []
    for _ in range(count):
        context = service().new_context()
        kept.append(context)
        with working_in(context):
            told.append(attempt(lambda: call(to, functions.scale, 2)))
    return told


def release_contexts() -> None:
    for context in kept:
        service().release(context.id)
    kept.clear()


def test_contexts_are_limited(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b", "c", limits=rpc.Limits(contexts=FEW))
    told = job["a"].do(open_contexts, "b", FEW + 3)
    refused = ["keeps 5 contexts for worker 'a' and takes no more" in each for each in told]
    assert refused == [False] * FEW + [True] * 3, told
    assert job["b"].do(contexts) == FEW
    assert job["c"].do(open_contexts, "b", 1) == ["answered 4"]
    for name in "ac":
        job[name].do(release_contexts)
    wait_until(job, "b", contexts, 0)
    assert job["a"].do(open_contexts, "b", FEW) == ["answered 4"] * FEW


def cross(to: str, count: int) -> list[str]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context():
        return [attempt(lambda: call(to, functions.weigh, x)) for _ in range(count)]


def test_what_contexts_keep_of_messages_is_limited(make_parties: MakeJob) -> None:  # noqa: F811
    # A call of `weigh` is a message with such a tensor each way.
    job = make_parties("a", "b", limits=rpc.Limits(records=2 * FEW))
    told = job["a"].do(cross, "b", FEW + 1)
    assert [each.startswith("answered") for each in told] == [True] * FEW + [False], told
    assert "keeps 10 records for worker" in told[-1]
    wait_until(job, "b", contexts, 0)
    assert all(each.startswith("answered") for each in job["a"].do(cross, "b", FEW))


def begin_passes(to: int, initiator: int, count: int) -> None:
    node = current_node()
    context = service().new_context()
    kept.append(context)
    with working_in(context):
        call(to, functions.scale, 2)
    for number in range(1, count + 1):
        pass_id = (initiator << WORKER_SHIFT) + number
        begin = encode(context.id, pass_id, Begin(Options(), History()))
        node.post(to, "autograd.pass", begin)


def passes_kept() -> int:
    return sum(len(context.participants) for context in service().container)


def test_passes_that_never_end_are_limited(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b", limits=rpc.Limits(passes=FEW))
    job["a"].do(begin_passes, B, A, FEW + 20)
    assert job["a"].do(call, "b", functions.scale, 2) == 4
    wait_until(job, "b", passes_kept, FEW)
    job["a"].do(release_contexts)
    wait_until(job, "b", contexts, 0)
    job["a"].do(begin_passes, B, A, 2)
    wait_until(job, "b", passes_kept, 2)


def test_passes_of_who_is_not_in_the_job_are_none(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b")
    job["a"].do(begin_passes, B, 77, 3)
    assert job["a"].do(call, "b", functions.scale, 2) == 4
    wait_until(job, "b", contexts, 1)
    assert job["b"].do(passes_kept) == 0


def begin_coroutines(to: str, count: int) -> list[str]:
    never_hold_back(to)
    futures = [rpc.rpc_async(to, functions.wait_at_gate) for _ in range(count)]
    kept.extend(futures)
    return [attempt(future.wait) for future in futures[FEW:]]


def coroutines_and_threads() -> tuple[int, int]:
    [loop] = current_node().coroutines.loops
    return len(asyncio.all_tasks(loop)), threading.active_count()


def test_coroutines_are_limited_as_calls_are(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b", "c", limits=rpc.Limits(calls_in_flight=FEW))
    told = job["a"].do(begin_coroutines, "b", FEW + 30)
    assert all("already runs 5 calls of worker 'a'" in each for each in told), told
    tasks, threads = job["b"].do(coroutines_and_threads)
    assert tasks == FEW
    assert threads < 40
    assert job["c"].do(call, "b", functions.open_gate) is None
    assert job["a"].do(outcomes) == ["answered 'through'"] * FEW


def outcomes() -> list[str]:
    return [attempt(future.wait) for future in kept[:FEW]]


def call_at_once(to: str, function: Any, count: int, threads: int) -> set[str]:
    """Calls that all begin before the first one is waited for, on each of the threads."""

    def begin_and_wait(_: int) -> list[str]:
        futures = [rpc.rpc_async(to, function, args=(torch.ones(2),)) for _ in range(count)]
        return [attempt(lambda: future.wait().tolist()) for future in futures]  # noqa: B023

    with ThreadPoolExecutor(threads) as pool:
        return {each for told in pool.map(begin_and_wait, range(threads)) for each in told}


@pytest.mark.parametrize("function", [functions.scale_in_a_while, functions.scale_slowly])
def test_who_makes_many_calls_at_once_waits_and_is_not_refused(
    make_parties: MakeJob,  # noqa: F811
    function: Any,
) -> None:
    job = make_parties("a", "b")
    assert job["a"].do(call_at_once, "b", function, 1000, 1) == {"answered [2.0, 2.0]"}


def test_threads_that_wait_for_room_do_not_keep_each_other_out(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(calls_in_flight=8))
    told = job["a"].do(call_at_once, "b", functions.scale_slowly, 10, 30)
    assert told == {"answered [2.0, 2.0]"}


def connect_anew(to: int) -> None:
    """As an honest worker never does: leave the connection, and come by another."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    with agent._lock:
        left: Any = agent._outgoing.pop(to)
    left.gone = True  # and does not mend it
    kept.append(left)
    agent._reach(to)


def call_and_connect_anew(to: str, times: int) -> list[str]:
    told = []
    for _ in range(times):
        futures = [rpc.rpc_async(to, functions.wait_for_gate, timeout=0.5) for _ in range(FEW)]
        told += [attempt(future.wait) for future in futures]
        connect_anew(B)
    return told


def running() -> int:
    return functions.waiting


def test_calls_that_run_are_counted_over_all_connections(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b", "c", limits=rpc.Limits(calls_in_flight=FEW))
    told = job["a"].do(call_and_connect_anew, "b", 4)
    assert all("timed out" in each for each in told[:FEW]), told
    assert all("already runs 5 calls of worker 'a'" in each for each in told[FEW:]), told
    assert job["b"].do(running) == FEW
    assert job["c"].do(call, "b", functions.open_gate) is None
    wait_until(job, "b", running, 0)
    assert job["a"].do(call, "b", functions.scale, 2) == 4


KILOBYTE = 1 << 10


def call_with_bytes(to: str, sizes: list[int], timeout: float) -> list[str]:
    futures = [
        rpc.rpc_async(
            to, functions.weigh_and_wait, args=(torch.zeros(n, dtype=torch.uint8),), timeout=timeout
        )
        for n in sizes
    ]
    return [attempt(future.wait) for future in futures]


def test_what_calls_that_run_have_brought_is_limited_in_bytes(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", "c", limits=rpc.Limits(bytes_in_flight=100 * KILOBYTE))
    # Its caller knows no more of what has timed out, and sends on.
    told = []
    for size in (60, 30, 60, 1):
        told += job["a"].do(call_with_bytes, "b", [size * KILOBYTE], 1)
    assert ["timed out" in each for each in told] == [True, True, False, True], told
    assert "that brought nearly 102400 bytes and takes no more" in told[2]
    assert job["b"].do(running) == 3
    # Others are not held to account for it, and one call may be as large as a message.
    opened = job["c"].begin(call_with_bytes, "b", [300 * KILOBYTE], 20)
    wait_until(job, "b", running, 4)
    job["b"].do(functions.open_gate)
    assert opened.result(30) == [f"answered {300 * KILOBYTE}"]
    wait_until(job, "b", running, 0)
    sizes = [90 * KILOBYTE]
    wait_until(job, "a", partial(call_with_bytes, "b", sizes, 20), [f"answered {sizes[0]}"])


def scale_many(to: str, count: int, size: int) -> set[str]:
    tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    futures = [rpc.rpc_async(to, functions.scale_in_a_while, args=(each,)) for each in tensors]
    return {attempt(lambda: int(future.wait().sum())) for future in futures}  # noqa: B023


def test_who_keeps_to_the_limit_in_bytes_waits_and_is_not_refused(
    make_parties: MakeJob,  # noqa: F811
) -> None:
    job = make_parties("a", "b", limits=rpc.Limits(bytes_in_flight=100 * KILOBYTE))
    size = 40 * KILOBYTE
    assert job["a"].do(scale_many, "b", 30, size) == {f"answered {2 * size}"}


def keep_few_answers(size: int) -> None:
    incoming.MOST_ANSWER_BYTES = size  # type: ignore[misc]


def never_acknowledge(to: str, calls: int) -> list[str]:
    """Read all answers, and never say so."""
    sending.depart = lambda *_: None
    stamp = Session.stamp
    Session.stamp = lambda self: (stamp(self)[0], 0)  # type: ignore[method-assign]
    Session.acknowledge = lambda self: 0  # type: ignore[method-assign]
    x = torch.ones(40 * KILOBYTE, dtype=torch.uint8)
    return [attempt(lambda: int(call(to, functions.scale, x).sum())) for _ in range(calls)]


def test_answers_that_are_not_taken_are_limited_in_bytes(make_parties: MakeJob) -> None:  # noqa: F811
    job = make_parties("a", "b")
    job["b"].do(keep_few_answers, 100 * KILOBYTE)
    told = job["a"].do(never_acknowledge, "b", 6)
    assert ["answered" in each for each in told] == [True] * 3 + [False] * 3, told
    assert "of answers that worker 'a' has not taken" in told[-1]


def call_under_one_number(to: str, *calls: tuple[Any, ...]) -> list[str]:
    node = current_node()
    callee = node.members.find(to)
    told = []
    for function, *args in calls:
        packed = pack((function, tuple(args), {}))
        pending = node.calls.begin(callee, functions.scale, 1, node.runtime.now())
        agent = node.transport
        assert isinstance(agent, Agent)
        link = agent._reach(callee.id).link  # type: ignore[union-attr]
        node.calls.take(callee.id, pending.call_id)
        pending.call_id = 7 << 40
        node.calls._to.setdefault(callee.id, {})[pending.call_id] = pending
        link.send(Kind.CALL, pending.call_id, packed.meta, packed.buffers, b"", packed.tensors)
        told.append(attempt(partial(node.wait, pending)))
    return told


HEAVY = (functions.weigh_and_wait, torch.zeros(60 * KILOBYTE, dtype=torch.uint8))
LIGHT = (functions.weigh_and_wait, torch.zeros(1))


@pytest.mark.parametrize(
    "calls",
    [(HEAVY, LIGHT), ((functions.wait_at_gate,), HEAVY)],
    ids=["light after heavy", "heavy after a light one that is answered later"],
)
def test_two_calls_under_one_number_are_not_taken(
    make_parties: MakeJob,  # noqa: F811
    calls: tuple[Any, ...],
) -> None:
    """The end of the light one would end the account of the heavy one."""
    job = make_parties("a", "b")
    first, second = job["a"].do(call_under_one_number, "b", *calls)
    assert "timed out" in first
    assert "already runs a call of worker 'a' with that number" in second
    job["b"].do(functions.open_gate)
