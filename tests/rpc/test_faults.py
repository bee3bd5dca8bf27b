"""What must not hang, leak or spread when one thing goes wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import cargo, outgoing
from telegrad.rpc.agent import Agent
from telegrad.rpc.node import current_node
from tests.rpc import functions
from tests.rpc.fleet import Job

MakeJob = Callable[..., Job]


def call(to: Any, function: Any, *args: Any, **options: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args, **options)


def agent() -> Agent:
    transport = current_node().transport
    assert isinstance(transport, Agent)
    return transport


def when_settled(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it is so once. A second look could see something else: descriptors come and go."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def references() -> dict[str, int]:
    return dict(rpc.debug_info()["references"])


# What a lost worker leaves.


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


def hold_remote(to: str) -> None:
    functions.kept = rpc.remote(to, torch.ones, args=(2,))
    functions.kept.to_here()


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


# Calls that never leave.


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


def deadline_of_call(to: str, timeout: float) -> float:
    started = time.monotonic()
    with pytest.raises(rpc.CallTimeout):
        rpc.rpc_sync(to, functions.nothing, timeout=timeout)
    return time.monotonic() - started


def test_a_deadline_holds_while_a_worker_that_does_not_answer_is_being_met(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", "c", liveness=60.0)
    job["b"].signal(signal.SIGSTOP)
    assert 0.5 <= job["a"].do(deadline_of_call, "b", 0.5) < 3.0
    assert job["a"].do(call, "c", functions.who_am_i) == "c"
    job["b"].signal(signal.SIGCONT)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


# Reference messages.


def keep_two(others: Any, own: Any) -> None:
    functions.kept = [others, own]


def share_both(owner: str, to: str) -> None:
    """Pass on a value of a worker that does not answer, and one of this worker."""
    rpc.rpc_async(to, keep_two, args=(functions.kept, rpc.RRef(torch.ones(1))), timeout=0)


def keep_own(own: Any) -> None:
    functions.kept = own


def share_own(to: str) -> None:
    rpc.rpc_sync(to, keep_own, args=(rpc.RRef(torch.ones(1)),))


def forget_kept() -> None:
    functions.kept = None
    gc.collect()


def own_forks_when_gone() -> int:
    when_settled(lambda: references()["forks"] == 0, 5.0)
    return references()["forks"]


def test_references_do_not_wait_behind_a_worker_that_does_not_answer(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", liveness=60.0)
    job["c"].do(hold_remote, "b")
    job["b"].signal(signal.SIGSTOP)
    job["c"].do(share_both, "b", "a")
    job["c"].do(share_own, "a")
    forks = job["c"].do(references)["forks"]
    job["a"].do(forget_kept)
    assert when_settled(lambda: job["c"].do(references)["forks"] == forks - 1, 5.0)
    job["b"].signal(signal.SIGCONT)


# The watch.


def break_the_watch() -> float:
    """A notice that fails, again and again; then a deadline that only the watch can see."""
    reading, writing = os.pipe()
    os.write(writing, b"x")

    def fail(events: int) -> None:
        if functions.record("notice") > 2:
            agent().watch.forget(reading)
        raise LookupError("in the watch")

    agent().watch.register(reading, fail, 1)
    assert when_settled(lambda: len(functions.recorded) > 2)
    future = rpc.rpc_async("b", functions.wait_event, args=("never",), timeout=0.3)
    started = time.monotonic()
    assert when_settled(future.done)
    return time.monotonic() - started


def test_the_watch_survives_an_error(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(break_the_watch) < 5.0
    assert "in the watch" in job["a"].end()


def use_up_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))


def cpu_seconds(seconds: float) -> float:
    started = time.process_time()
    time.sleep(seconds)
    return time.process_time() - started


def give_descriptors_back() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def test_a_worker_without_descriptors_waits_for_one_and_does_not_spin(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=60.0)
    job["b"].do(use_up_descriptors)
    waiting = job["a"].begin(call, "b", functions.who_am_i)
    assert job["b"].do(cpu_seconds, 1.0) < 0.5
    job["b"].do(give_descriptors_back)
    assert waiting.result(30) == "b"


# Results and arguments.


class EndsItsReader:
    """Rebuilding it wants to end the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return end_process, ()


def end_process() -> None:
    raise SystemExit(3)


def give_what_ends_its_reader() -> EndsItsReader:
    return EndsItsReader()


def read_what_ends_its_reader(to: str) -> str:
    with pytest.raises(rpc.RemoteError, match="cannot be read") as caught:
        rpc.rpc_sync(to, give_what_ends_its_reader)
    with pytest.raises(rpc.RemoteError, match="cannot be read"):
        rpc.rpc_async(to, give_what_ends_its_reader).wait()
    return str(caught.value)


def test_a_result_whose_rebuilding_ends_the_process_is_an_error(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert "give_what_ends_its_reader" in job["a"].do(read_what_ends_its_reader, "b")
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def wrong_arguments(to: str) -> None:
    for begin in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match="args is a int"):
            begin(to, torch.add, args=1)
        with pytest.raises(TypeError, match="args is a str"):
            begin(to, torch.add, args="ab")
        with pytest.raises(TypeError, match="kwargs is a list"):
            begin(to, torch.add, kwargs=[("alpha", 1)])


def test_arguments_that_are_no_arguments_are_refused_before_anything_leaves(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b")
    job["a"].do(wrong_arguments, "b")
    assert job["a"].do(rpc.debug_info)["links"]["outgoing links"] == 0


# Values that never come.


class Slow:
    def __init__(self) -> None:
        functions.wait_event("make it")

    def answer(self) -> int:
        return 42


def ask_in_vain(to: str, times: int) -> None:
    functions.kept = rpc.remote(to, Slow)
    for _ in range(times):
        future = functions.kept.rpc_async(timeout=0.05).answer()
        with pytest.raises(rpc.CallTimeout):
            future.wait()


def ask_and_make(to: str) -> int:
    future = functions.kept.rpc_async().answer()
    rpc.rpc_sync(to, functions.set_event, args=("make it",))
    return int(future.wait())


def test_methods_of_a_value_that_does_not_come_hold_no_thread(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    before = job["b"].do(threading.active_count)
    job["a"].do(ask_in_vain, "b", 30)
    assert job["b"].do(threading.active_count) < before + 10
    assert job["a"].do(ask_and_make, "b") == 42


# Back-pressure.


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


# Descriptors.


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_files() -> list[str]:
    """What the descriptors of this process refer to."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The one that lists them.
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(files)


def call_all(names: list[str]) -> int:
    gc.disable()
    for name in names:
        rpc.rpc_sync(name, call, args=(rpc.get_worker_info(), functions.nothing))
    return descriptors()


def files_more_when_lost(count: int) -> list[str]:
    """What is open and was not before the calls, once that many workers are lost.

    For moments there are more: a worker that looks after others reads their entries in /proc.
    """
    assert when_settled(lambda: len(rpc.debug_info()["lost workers"]) == count)
    if when_settled(lambda: len(open_files()) <= len(functions.kept), 5.0):
        return []
    more = open_files()
    for file in functions.kept:
        if file in more:
            more.remove(file)
    return more


def keep_open_files() -> int:
    functions.kept = open_files()
    return descriptors()


def test_links_of_lost_workers_free_their_descriptors_without_a_collection(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", "c", "d")
    before = job["a"].do(keep_open_files)
    assert job["a"].do(call_all, ["b", "c", "d"]) > before
    for name in "bcd":
        job[name].kill()
    assert job["a"].do(files_more_when_lost, 3) == []


def cut_and_call(to: str, times: int) -> int:
    """Break the connection again and again; how many descriptors that leaves."""
    gc.disable()
    rpc.rpc_sync(to, functions.nothing)
    before = descriptors()
    for _ in range(times):
        for end in agent().ends():
            end.link.mark_broken()
        rpc.rpc_sync(to, functions.nothing)
    return 0 if when_settled(lambda: descriptors() <= before, 5.0) else descriptors() - before


def test_connections_that_were_mended_free_their_descriptors_without_a_collection(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b")
    assert job["a"].do(cut_and_call, "b", 20) <= 1


# Leaving.


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
    assert job["a"].do(timed_leave) < 3.0
