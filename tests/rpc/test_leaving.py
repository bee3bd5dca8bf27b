"""Leaving a job, in good order or not: who waits, who is told, and what is left."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import current_node
from telegrad.rpc.job_files import MARK, remove_abandoned, remove_if_last, write_key
from telegrad.wire.address import job_directory
from telegrad.wire.keys import new_key
from tests.rpc import functions
from tests.rpc.fleet import Job, Process, init, join, results, serve_store
from tests.rpc.inside import begin_call, call, open_files, outcome_of_begun, when_settled
from tests.scripts import run_script

Start = Callable[[], Process]
MakeJob = Callable[..., Job]


def job_directories() -> set[Path]:
    return set(Path(os.environ["XDG_RUNTIME_DIR"]).glob("telegrad-*"))


def leftovers() -> tuple[list[str], list[str]]:
    """The threads and the open files of this process, once what is about to end has ended."""
    when_settled(lambda: threading.active_count() == 1)
    # After the last thread, whose frames may refer to what is in a cycle.
    gc.collect()
    return [thread.name for thread in threading.enumerate()], open_files()


def visit(processes: list[Process], port: int) -> None:
    """Join a job, make a large call, and leave."""
    results([p.begin(join, f"w{rank}", rank, 2, port) for rank, p in enumerate(processes)])
    processes[0].do(call, "w1", functions.echo, torch.ones(100_000))
    results([process.begin(rpc.shutdown) for process in processes])


def test_leaving_leaves_no_thread_socket_or_file(start: Start) -> None:
    store, processes, directories = serve_store(), [start(), start()], job_directories()
    visit(processes, store.port)
    before = processes[0].do(leftovers)
    for _ in range(3):
        visit(processes, store.port)
    assert processes[0].do(leftovers) == before
    assert before[0] == ["MainThread"]
    # Those of tests that run at the same time go, too, when their jobs end.
    new = job_directories() - directories
    assert when_settled(lambda: not new & job_directories(), 90.0)


def shut_down_and_keep_the_node() -> tuple[list[str], list[str]]:
    """What is open though something, as a cycle that no collection found yet, refers to the job."""
    node = current_node()
    rpc.shutdown()
    found = leftovers()
    assert node.info.name
    return found


def test_a_job_that_something_still_refers_to_has_no_socket_after_it_was_left(start: Start) -> None:
    store, process = serve_store(), start()
    before = process.do(leftovers)
    process.do(join, "alone", 0, 1, store.port)
    assert process.do(shut_down_and_keep_the_node) == before


def leave_events(path: list[str], count: int) -> None:
    """Calls that make calls that make calls, begun by a worker that shuts down at once."""
    if count:
        rpc.rpc_async(path[0], leave_events, args=(path[1:] + path[:1], count - 1))
    functions.record(count)
    time.sleep(0.01)


def shut_down_and_count(path: list[str], count: int) -> int:
    if path:
        leave_events(path, count)
    rpc.shutdown(timeout=30)
    return len(functions.take_recorded())


def test_a_graceful_shutdown_waits_for_calls_that_running_calls_still_make(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", "c")
    counts = [
        job["a"].begin(shut_down_and_count, ["b", "c", "a"], 60),
        job["b"].begin(shut_down_and_count, [], 0),
        job["c"].begin(shut_down_and_count, [], 0),
    ]
    assert sum(results(counts)) == 61


def timed_shutdown(**options: Any) -> tuple[float, BaseException | None]:
    started = time.monotonic()
    try:
        rpc.shutdown(**options)
    except rpc.TelegradError as error:
        return time.monotonic() - started, error
    return time.monotonic() - started, None


def test_a_shutdown_that_others_do_not_join_ends_at_its_timeout(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    seconds, error = job["a"].do(timed_shutdown, timeout=0.5)
    assert isinstance(error, rpc.CallTimeout)
    assert "not every worker has called shutdown" in str(error)
    assert 0.5 <= seconds < 20
    assert not job["a"].do(rpc.is_initialized)


@pytest.mark.parametrize("size", [2, None])
def test_a_shutdown_is_not_held_up_by_a_function_that_hangs(start: Start, size: Any) -> None:
    store = serve_store()
    a, b = start(), start()
    ranks = (0, 1) if size else (None, None)
    results(
        [
            a.begin(join, "a", ranks[0], size, store.port),
            b.begin(join, "b", ranks[1], size, store.port),
        ]
    )
    a.do(begin_call, "b", functions.wait_event, "never", timeout=0)
    leaving = [a.begin(timed_shutdown, timeout=1), b.begin(timed_shutdown, timeout=1)]
    for seconds, _ in results(leaving):
        # Its timeout, farewells to who does not read them, and a busy machine.
        assert seconds < 1 + 20


def test_callers_that_gave_up_do_not_hold_a_shutdown_up(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    with pytest.raises(rpc.CallTimeout):
        job["a"].do(call, "b", functions.wait_event, "never", timeout=0.1)
    leaving = [job[name].begin(timed_shutdown) for name in "ab"]
    for seconds, error in results(leaving):
        assert error is None
        assert seconds < 25


def test_leaving_without_grace_tells_those_who_wait(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(begin_call, "b", functions.announce_and_wait, "begun", "never")
    job["c"].do(call, "b", functions.wait_event, "begun")
    job["b"].do(rpc.shutdown, graceful=False)
    with pytest.raises(rpc.WorkerLost, match=r"'b' is gone: it has left.*announce_and_wait"):
        job["a"].do(outcome_of_begun)
    assert job["a"].do(call, "c", functions.who_am_i) == "c"
    for seconds, error in results([job[name].begin(timed_shutdown) for name in "ac"]):
        assert error is None
        assert seconds < 25


def test_calls_of_a_worker_that_leaves_end_with_job_closed(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(begin_call, "b", functions.wait_event, "never")
    job["a"].do(rpc.shutdown, graceful=False)
    with pytest.raises(rpc.JobClosed, match="'a' shut down before the answer came"):
        job["a"].do(outcome_of_begun)


def leave_while_a_value_is_made() -> str:
    """What a thread hears that waits for a value of this worker when this one leaves."""
    made = rpc.remote(rpc.get_worker_info(), functions.wait_event, args=("never",))
    waits, heard = threading.Event(), []
    changed: Any = current_node().values._changed
    wait = changed.wait

    def waiting(timeout: float | None = None) -> bool:
        waits.set()
        return bool(wait(timeout))

    changed.wait = waiting

    def fetch() -> None:
        try:
            made.to_here(timeout=0)
        except rpc.JobClosed as error:
            heard.append(str(error))

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    assert waits.wait(30)
    rpc.shutdown(graceful=False)
    thread.join(30)
    functions.set_event("never")
    return heard[0] if heard else "nothing"


def test_who_waits_for_a_value_of_its_own_worker_is_told_that_it_leaves(make_job: MakeJob) -> None:
    heard = make_job("a", "b")["a"].do(leave_while_a_value_is_made)
    assert heard.startswith("Worker 'a' shut down before the value of ")


def leave_with_a_callback_that_hangs(to: str) -> list[str]:
    """What comes first: the end of shutdown, or of what is done with a call that it cut off."""
    happened: list[str] = []
    left, ended = threading.Event(), threading.Event()

    def hang(future: object) -> None:
        left.wait(20)
        happened.append("the callback has ended")
        ended.set()

    rpc.rpc_async(to, functions.wait_event, args=("never",), timeout=0).add_done_callback(hang)
    rpc.shutdown(graceful=False)
    happened.append("shutdown has ended")
    left.set()
    assert ended.wait(30)
    return happened


def test_a_shutdown_is_not_held_up_by_the_callback_of_a_call_that_it_cuts_off(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b")
    happened = job["a"].do(leave_with_a_callback_that_hangs, "b")
    assert happened == ["shutdown has ended", "the callback has ended"]
    job["b"].do(functions.set_event, "never")


def leave_while_a_worker_is_awaited(name: str) -> str:
    """What a thread hears that waits for a worker to come back when its own leaves."""
    heard: list[str] = []
    waits = threading.Event()
    node = current_node()
    find = node.members.find

    def found(who: Any) -> Any:
        waits.set()
        return find(who)

    node.members.find = found  # type: ignore[method-assign]

    def wait() -> None:
        try:
            rpc.wait_for_worker(name, timeout=0)
        except rpc.JobClosed as error:
            heard.append(str(error))

    assert when_settled(lambda: bool(rpc.debug_info()["lost workers"]))
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waits.wait(30)
    rpc.shutdown(graceful=False)
    thread.join(30)
    return heard[0] if heard else "nothing"


def test_who_waits_for_a_worker_is_told_that_its_own_leaves(make_job: MakeJob) -> None:
    job = make_job("a", "b", life=0)
    job["b"].kill()
    heard = job["a"].do(leave_while_a_worker_is_awaited, "b")
    assert heard == "Worker 'a' shut down while it waited for 'b'."


def test_a_job_whose_workers_were_killed_leaves_nothing_once_another_starts(
    make_job: MakeJob,
) -> None:
    before = job_directories()
    killed = make_job("a", "b")
    [left] = job_directories() - before
    killed.abandon()
    assert any(left.glob("*.sock"))
    os.utime(left, (0, 0))
    make_job("a", "b")
    assert not left.exists()


@pytest.mark.parametrize("transports", [("unix", "tcp"), ("tcp",)])
def test_a_worker_that_cannot_listen_leaves_no_key(
    start: Start, transports: tuple[str, ...], tmp_path: Path
) -> None:
    before, process = job_directories(), start()
    for size in (1, None):
        with pytest.raises(OSError, match="not an address of this host"):
            process.do(
                init,
                "a",
                rank=0,
                world_size=size,
                init_method=f"file://{tmp_path}/meeting {size}",
                host="192.0.2.1",
                transports=transports,
            )
    assert not job_directories() - before


def test_the_key_of_workers_that_are_called_over_tcp_only_goes_with_the_last(start: Start) -> None:
    store, processes, before = serve_store(), [start(), start()], job_directories()
    over_tcp: dict[str, Any] = {"transports": ("tcp",), "host": "127.0.0.1"}
    for name, process in zip("ab", processes, strict=True):
        process.do(join, name, None, None, store.port, **over_tcp)
    [made] = job_directories() - before
    os.utime(made, (0, 0))
    start().do(remove_abandoned, made.parent)
    processes[0].do(rpc.shutdown)
    assert (made / "key").exists(), "a worker that comes later needs it"
    processes[1].do(rpc.shutdown)
    assert not made.exists()


def found_and_wait(job: str) -> None:
    write_key(job, new_key())


@pytest.mark.parametrize("old", [False, True], ids=["just made", "made long ago"])
def test_what_was_left_by_who_died_while_it_founded_a_job_goes_once_it_is_old(
    start: Start, old: bool
) -> None:
    founder = start()
    founder.do(found_and_wait, f"founded {old}")
    with_key, empty = job_directory(f"founded {old}"), job_directory(f"empty {old}")
    for each in (with_key, empty):
        if old:
            os.utime(each, (0, 0))
    remove_abandoned(with_key.parent)
    assert (with_key / "key").exists(), "its founder is alive"
    assert empty.exists() is not old
    founder.kill()
    if old:
        os.utime(with_key, (0, 0))
    remove_abandoned(with_key.parent)
    assert with_key.exists() is not old
    if not old:
        shutil.rmtree(with_key)
        empty.rmdir()


def test_of_workers_that_leave_at_once_one_removes_what_the_job_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may find the other's files, and look at them when they are gone."""
    write_key("left at once", new_key())
    directory = job_directory("left at once")
    found = [*directory.iterdir(), directory / "1-2.sock", directory / f"3-4{MARK}"]
    monkeypatch.setattr(Path, "iterdir", lambda path: found)
    remove_if_last(directory)
    assert not directory.exists()


def test_the_last_worker_removes_the_sockets_of_those_that_were_killed(make_job: MakeJob) -> None:
    before = job_directories()
    job = make_job("a", "b")
    [made] = job_directories() - before
    job["b"].kill()
    job["a"].do(rpc.shutdown)
    assert not made.exists()


EXITS_DURING_A_CALL = """
import sys, threading, torch
from telegrad import rpc

begun, left = threading.Event(), threading.Event()

def compute():
    turns = 2000
    while turns:
        begun.set()
        turns -= left.is_set()
        future = torch.futures.Future()
        future.then(lambda done: done.wait())
        future.set_result(1)

rpc.init_rpc("alone", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}")
rpc.rpc_async("alone", compute)
begun.wait()
rpc.shutdown(graceful=False)
left.set()
sys.exit(3)
"""


def test_a_process_that_exits_while_a_call_runs_keeps_its_exit_code(tmp_path: Path) -> None:
    done = run_script("-c", EXITS_DURING_A_CALL, tmp_path / "meeting")
    assert (done.returncode, done.stderr) == (3, "")
