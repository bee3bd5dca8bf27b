"""Workers that die: who waits for them is told at once which, why and what was pending."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import current_node
from telegrad.rpc.runtime import _all_threads
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import call

MakeJob = Callable[..., Job]
UNIX: dict[str, Any] = {}
TCP: dict[str, Any] = {"host": "127.0.0.1", "transports": ("tcp",)}
TRANSPORTS = [pytest.param(UNIX, id="unix"), pytest.param(TCP, id="tcp")]


def call_until_lost(to: str, function: Any, *args: Any) -> tuple[str, float]:
    """What the error says, and when it came."""
    try:
        rpc.rpc_sync(to, function, args=args, timeout=30)
    except rpc.WorkerLost as error:
        return str(error), time.monotonic()
    raise AssertionError("the call was answered")


def futures_until_lost(to: str, count: int) -> tuple[list[str], float]:
    futures = [
        rpc.rpc_async(to, functions.announce_and_wait, args=(f"f{number}", "never"))
        for number in range(count)
    ]
    errors = []
    for future in futures:
        try:
            future.wait()
        except rpc.WorkerLost as error:
            errors.append(str(error))
    return errors, time.monotonic()


def sockets() -> int:
    """Those that are open; one that just goes is none."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "socket:" in os.readlink(each)
    return found


def wait_for_sockets(count: int) -> int:
    until = time.monotonic() + 10
    while sockets() != count and time.monotonic() < until:
        time.sleep(0.02)
    return sockets()


def sever_and_call(to: str) -> None:
    """A connection breaks, and is mended."""
    agent: Any = current_node().transport
    agent.sever(rpc.get_worker_info(to).id)
    call(to, functions.nothing)


@pytest.mark.parametrize("options", TRANSPORTS)
def test_what_a_connection_had_open_goes_with_it_and_not_when_a_collection_finds_it(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", "c", **options)
    job["a"].do(gc.disable)
    job["a"].do(call, "c", functions.nothing)
    before = job["a"].do(sockets)
    job["a"].do(call, "b", functions.nothing)
    job["b"].do(call, "a", functions.nothing)
    both = job["a"].do(sockets)
    assert both > before
    for _ in range(5):
        job["a"].do(sever_and_call, "b")
    assert job["a"].do(wait_for_sockets, both) == both
    failing = job["a"].begin(futures_until_lost, "b", 4)
    job["b"].kill()
    assert len(failing.result(30)[0]) == 4
    assert job["a"].do(wait_for_sockets, before) == before


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_pending_call_to_a_killed_worker_fails_within_a_second(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", "c", **options)
    waiting = job["a"].begin(call_until_lost, "b", functions.announce_and_wait, "begun", "never")
    job["c"].do(call, "b", functions.wait_event, "begun")
    job["b"].kill()
    killed = time.monotonic()
    message, failed = waiting.result(30)
    # Half a second on a machine that has nothing else to do.
    assert failed - killed < 2.0
    assert "Worker 'b' is gone" in message
    assert "its process does not answer any more" in message or "has ended" in message
    assert "announce_and_wait on worker 'b'" in message
    message, _ = job["a"].do(call_until_lost, "b", functions.nothing)
    assert "Worker 'b' is gone" in message
    assert job["a"].do(call, "c", functions.who_am_i) == "c"


def test_all_futures_of_a_killed_worker_fail(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    waiting = job["a"].begin(futures_until_lost, "b", 50)
    job["c"].do(call, "b", functions.wait_event, "f49")
    job["b"].kill()
    killed = time.monotonic()
    errors, failed = waiting.result(30)
    assert len(errors) == 50
    assert failed - killed < 3.0


def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    job["b"].kill()
    killed = time.monotonic()
    message, failed = job["a"].do(call_until_lost, "b", functions.nothing)
    assert "Worker 'b' is gone" in message
    assert failed - killed < 3.0


def note_losses() -> None:
    rpc.on_worker_lost(lambda worker, reason: functions.record((worker.name, reason)))


def losses_noted() -> list[Any]:
    until = time.monotonic() + 10
    while not functions.recorded and time.monotonic() < until:
        time.sleep(0.005)
    return functions.take_recorded()


def end_and_tell_losses(late: float) -> list[Any]:
    """End the job; the word that it is over comes late, when the others have left and ended."""
    closing = current_node().services["closing"]
    await_all = closing._await_all

    def await_all_and_longer(timeout: float) -> None:
        await_all(timeout)
        time.sleep(late)

    closing._await_all = await_all_and_longer
    rpc.shutdown()
    for threads in list(_all_threads):
        assert threads.await_rest(10)
    return functions.take_recorded()


@pytest.mark.parametrize("acquainted", [False, True], ids=["strangers", "acquainted"])
def test_the_end_of_the_job_is_no_loss(make_job: MakeJob, acquainted: bool) -> None:
    job = make_job("a", "b", "c")
    job["c"].do(note_losses)
    if acquainted:
        job["c"].do(call, "b", functions.nothing)
        job["b"].do(call, "c", functions.nothing)
    leaving = [job[name].begin(rpc.shutdown) for name in ("a", "b")]
    last = job["c"].begin(end_and_tell_losses, 0.7)
    for name, each in zip("ab", leaving, strict=True):
        each.result(30)
        job[name].end()
    assert last.result(30) == []


def test_a_worker_that_leaves_while_others_stay_is_told(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(note_losses)
    job["a"].do(call, "b", functions.nothing)
    job["b"].do(rpc.shutdown, graceful=False)
    assert job["a"].do(losses_noted) == [("b", "it has left the job (its shutdown() was called)")]


def test_a_worker_that_dies_while_others_wait_in_shutdown_is_told(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(note_losses)
    job["a"].do(call, "c", functions.nothing)
    leaving = job["a"].begin(end_and_tell_losses, 0.0)
    job["c"].kill()
    job["b"].do(wait_until_noted, "a")
    job["b"].do(rpc.shutdown)
    [(name, _)] = leaving.result(30)
    assert name == "c"


def wait_until_noted(to: str) -> None:
    until = time.monotonic() + 10
    while not call(to, losses_so_far):
        assert time.monotonic() < until


def losses_so_far() -> int:
    return len(functions.recorded)


def test_a_worker_killed_while_idle_is_told_to_who_asked(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(note_losses)
    job["a"].do(call, "b", functions.nothing)
    job["b"].kill()
    [(name, reason)] = job["a"].do(losses_noted)
    assert name == "b"
    assert reason
    assert "b" in job["a"].do(rpc.debug_info)["lost workers"]


def test_a_worker_that_was_never_called_and_died_is_reported_as_unreachable(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b")
    job["b"].kill()
    message, _ = job["a"].do(call_until_lost, "b", functions.nothing)
    assert "Worker 'b' is gone: it" in message


def test_a_worker_that_was_never_called_and_died_is_told_to_who_asked(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(note_losses)
    job["b"].kill()
    [(name, reason)] = job["a"].do(losses_noted)
    assert (name, reason) == ("b", "its process has ended")


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_callee_killed_in_the_middle_of_a_large_reply_is_lost_and_nothing_else(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", "c", **options)
    waiting = job["a"].begin(call_until_lost, "b", make_large_and_die, 16 << 20)
    message, _ = waiting.result(60)
    assert "Worker 'b' is gone" in message
    x = torch.arange(1 << 18)
    assert torch.equal(job["a"].do(call, "c", functions.echo, x), x)


def make_large_and_die(count: int) -> torch.Tensor:
    """The process is killed while the reply is being written."""
    import os
    import threading

    def die() -> None:
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die).start()
    return torch.ones(count)


def test_a_caller_that_is_killed_leaves_the_callee_unharmed(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    dying = job["a"].begin(call, "b", functions.announce_and_wait, "begun", "go on")
    job["c"].do(call, "b", functions.wait_event, "begun")
    job["a"].kill()
    with pytest.raises(ConnectionError):
        dying.result(30)
    job["c"].do(call, "b", functions.set_event, "go on")
    assert job["c"].do(call, "b", functions.bounce, 20, ["b", "c"]) == 20


def test_the_others_shut_down_with_grace_after_a_loss(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(call, "b", functions.nothing)
    job["a"].do(call, "c", functions.nothing)
    job["b"].kill()
    started = time.monotonic()
    for future in [job[name].begin(rpc.shutdown) for name in "ac"]:
        future.result(30)
    assert time.monotonic() - started < 25


def test_the_others_shut_down_with_grace_when_the_first_worker_is_lost(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["b"].do(call, "c", functions.nothing)
    job["c"].do(call, "b", functions.nothing)
    leaving = [job[name].begin(rpc.shutdown) for name in "bc"]
    time.sleep(0.3)
    job["a"].kill()
    for future in leaving:
        future.result(30)


def test_a_stopped_worker_is_lost_after_the_liveness_window(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", liveness=1.0)
    waiting = job["a"].begin(call_until_lost, "b", functions.announce_and_wait, "begun", "never")
    job["c"].do(call, "b", functions.wait_event, "begun")
    job["b"].signal(signal.SIGSTOP)
    message, _ = waiting.result(30)
    assert "Worker 'b' is gone" in message
    job["b"].signal(signal.SIGCONT)


def segments() -> int:
    """How many pieces of the shared memory of any worker this process has open or mapped."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    found = [*links, *Path("/proc/self/maps").read_text().splitlines()]
    return sum("memfd:telegrad-arena" in each for each in found)


def keep_large(to: str, count: int) -> int:
    functions.kept = rpc.rpc_sync(to, torch.ones, args=(count,))
    return segments()


def let_go_when_lost(count: int) -> int:
    """Of what a lost worker sent: valid as long as it is kept. The segments that are left."""
    until = time.monotonic() + 20
    while not rpc.debug_info()["lost workers"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert float(functions.kept.sum()) == count
    functions.kept = None
    while segments() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return segments()


def test_the_shared_memory_of_a_killed_worker_is_given_back(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(segments) == 0
    assert job["a"].do(keep_large, "b", 1 << 20) > 0
    job["b"].kill()
    assert job["a"].do(let_go_when_lost, 1 << 20) == 0


def send_large_with_timeout(to: str, count: int, seconds: float) -> float:
    started = time.monotonic()
    try:
        rpc.rpc_sync(to, functions.echo, args=(torch.ones(count),), timeout=seconds)
    except rpc.CallTimeout:
        return time.monotonic() - started
    raise AssertionError("the call was answered")


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_large_argument_to_a_worker_that_does_not_read_ends_at_its_deadline(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job("a", "b", liveness=60.0, **options)
    job["a"].do(call, "b", functions.nothing)
    job["b"].signal(signal.SIGSTOP)
    seconds = job["a"].do(send_large_with_timeout, "b", 16 << 20, 1.0)
    assert seconds < 20
    job["b"].signal(signal.SIGCONT)
    # What was given up must not reach the other end torn: the next call is answered, or refused.
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
