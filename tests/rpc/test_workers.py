"""Joining and leaving a job, and what is said when that cannot be."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import rendezvous
from telegrad.rpc.errors import InvalidWorker
from telegrad.rpc.rendezvous import Rendezvous
from telegrad.wire.keys import JobKeyError
from tests.rpc import functions
from tests.rpc.fleet import Job, Process, join, serve_store

Start = Callable[[], Process]
MakeJob = Callable[..., Job]
KEY = b"0123456789abcdef0123456789abcdef"


def init(name: str, env: dict[str, str] | None = None, **options: Any) -> None:
    os.environ.update(env or {})
    rpc.init_rpc(name, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(to: Any, function: Any, *args: Any, **options: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args, **options)


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(60) for future in futures]


def failures(futures: list[Future[Any]]) -> list[BaseException | None]:
    return [future.exception(60) for future in futures]


# Joining.


def test_workers_meet_by_environment(start: Start) -> None:
    port = str(free_port())
    processes = [start(), start()]
    joining = []
    for rank, process in enumerate(processes):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        joining.append(process.begin(init, f"w{rank}", env))
    results(joining)
    assert processes[0].do(call, "w1", functions.who_am_i) == "w1"
    results([process.begin(rpc.shutdown) for process in processes])


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_workers_meet_at_a_url(start: Start, kind: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meeting"
    processes = [start(), start(), start()]
    results(
        [
            process.begin(init, f"w{rank}", rank=rank, world_size=3, init_method=url)
            for rank, process in enumerate(processes)
        ]
    )
    assert processes[2].do(call, "w1", functions.bounce, 10, ["w0", "w1", "w2"]) == 10
    results([process.begin(rpc.shutdown) for process in processes])


def test_a_process_joins_again_after_it_left(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    for _ in range(3):
        assert job["a"].do(call, "b", functions.who_am_i) == "b"
        results([job[name].begin(rpc.shutdown) for name in "ab"])
        with pytest.raises(rpc.NotInitialized):
            job["a"].do(call, "b", functions.who_am_i)
        results(
            [job[n].begin(join, n, r, 2, job.store.port) for r, n in enumerate("ab")],
        )
    assert job["b"].do(call, "a", functions.who_am_i) == "a"
    job.close()


def test_leaving_leaves_no_thread_socket_or_file(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    before = job["a"].do(leftovers)
    job["a"].do(call, "b", functions.echo, torch.ones(100_000))
    results([job[name].begin(rpc.shutdown) for name in "ab"])
    for _ in range(3):
        results([job[n].begin(join, n, r, 2, job.store.port) for r, n in enumerate("ab")])
        job["a"].do(call, "b", functions.echo, torch.ones(100_000))
        results([job[name].begin(rpc.shutdown) for name in "ab"])
    after = job["a"].do(leftovers)
    assert after["threads"] <= 2, after
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["directories"] == []


def leftovers() -> dict[str, Any]:
    """What this process has open, once threads that are about to end have ended."""
    import gc
    import threading

    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > 1 and not rpc.is_initialized() and time.monotonic() < until:
        time.sleep(0.01)
    return {
        "threads": threading.active_count(),
        "names": [thread.name for thread in threading.enumerate()],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "directories": sorted(_job_directories_of_this_process()),
    }


def _job_directories_of_this_process() -> set[str]:
    found = set()
    for line in Path("/proc/self/net/unix").read_text().splitlines():
        match = re.search(r"(\S*telegrad-\S+)/\d+-", line)
        if match and str(os.getpid()) in match.group(1):
            found.add(match.group(1))
    return found


def test_workers_come_and_go_without_a_world_size(start: Start) -> None:
    store = serve_store()
    a, b, c = start(), start(), start()
    a.do(join, "a", None, None, store.port)
    b.do(join, "b", None, None, store.port)
    assert a.do(call, "b", functions.who_am_i) == "b"
    assert b.do(call, "a", functions.who_am_i) == "a"
    c.do(join, "c", None, None, store.port)
    assert a.do(call, "c", functions.bounce, 9, ["a", "b", "c"]) == 9
    assert [info.name for info in c.do(rpc.get_worker_infos)] == ["a", "b", "c"]
    b.do(rpc.shutdown)
    with pytest.raises(rpc.WorkerLost, match="'b' is gone: it has left the job"):
        a.do(call, "b", functions.who_am_i)
    assert [info.name for info in a.do(rpc.get_worker_infos)] == ["a", "c"]
    assert a.do(call, "c", functions.who_am_i) == "c"
    c.do(rpc.shutdown)
    a.do(rpc.shutdown)


def join_slowly(name: str, port: int, directory: Path) -> None:
    """Join an open job, with a pause after the key has been read."""
    agree = Rendezvous._agree_on_key

    def agree_and_pause(visit: Rendezvous, *args: Any) -> Any:
        key = agree(visit, *args)
        Rendezvous._agree_on_key = agree
        (directory / "has read").touch()
        while not (directory / "go on").exists():
            time.sleep(0.01)
        return key

    Rendezvous._agree_on_key = agree_and_pause
    join(name, None, None, port)


def test_a_worker_that_comes_while_the_last_one_leaves_has_a_job(
    start: Start, tmp_path: Path
) -> None:
    store = serve_store()
    a, b, c = start(), start(), start()
    a.do(join, "a", None, None, store.port)
    joining = b.begin(join_slowly, "b", store.port, tmp_path)
    while not (tmp_path / "has read").exists():
        time.sleep(0.01)
    a.do(rpc.shutdown)
    (tmp_path / "go on").touch()
    joining.result(20)
    c.do(join, "c", None, None, store.port)
    assert c.do(call, "b", functions.who_am_i) == "b"


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_a_name_is_free_again_when_its_worker_leaves_or_dies(start: Start, how: str) -> None:
    store = serve_store()
    a, old, new = start(), start(), start()
    a.do(join, "a", None, None, store.port)
    old.do(join, "b", None, None, store.port)
    with pytest.raises(rpc.RendezvousError, match="'b' is not unique"):
        new.do(join, "b", None, None, store.port)
    first = a.do(call, "b", os.getpid)
    if how == "leaves":
        old.do(rpc.shutdown)
    else:
        old.kill()
        with pytest.raises(rpc.WorkerLost):
            a.do(call, "b", os.getpid)
    new.do(join, "b", None, None, store.port)
    assert a.do(call, "b", os.getpid) == new.pid != first
    assert new.do(call, "a", functions.who_am_i) == "a"


def test_workers_find_each_other_by_url_without_a_world_size(start: Start, tmp_path: Path) -> None:
    a, b = start(), start()
    a.do(init, "a", init_method=f"file://{tmp_path}/meeting")
    b.do(init, "b", init_method=f"file://{tmp_path}/meeting")
    assert a.do(call, "b", functions.who_am_i) == "b"
    b.do(rpc.shutdown)
    a.do(rpc.shutdown)


# What is said when it cannot be.


def join_all(processes: list[Process], *whos: tuple[str, int, int], **options: Any) -> list[Any]:
    store = serve_store()
    futures = [
        process.begin(join, name, rank, size, store.port, **options)
        for process, (name, rank, size) in zip(processes, whos, strict=True)
    ]
    found = failures(futures)
    del store
    return found


def test_a_name_taken_twice_is_told_to_all(start: Start) -> None:
    started = time.monotonic()
    found = join_all([start(), start(), start()], ("a", 0, 3), ("a", 1, 3), ("c", 2, 3))
    assert all(isinstance(error, rpc.RendezvousError) for error in found)
    assert all("'a' is not unique" in str(error) for error in found)
    assert time.monotonic() - started < 10


def test_different_world_sizes_are_told_to_all_at_once(start: Start) -> None:
    started = time.monotonic()
    found = join_all([start(), start()], ("a", 0, 2), ("b", 1, 3))
    assert all("world_size=3, but rank 0 was told 2" in str(error) for error in found), found
    assert time.monotonic() - started < 10


def test_a_rank_taken_twice_is_told_to_who_came_second(start: Start) -> None:
    started = time.monotonic()
    store = serve_store()
    first, second, third = start(), start(), start()
    joining = first.begin(join, "a", 0, 2, store.port)
    store.wait(["telegrad/visitor 1 of 0"])
    with pytest.raises(rpc.RendezvousError, match=r"rank 0 is taken twice.*'c'.*'a'"):
        second.do(join, "c", 0, 2, store.port)
    third.do(join, "b", 1, 2, store.port)
    joining.result(10)
    assert first.do(call, "b", functions.who_am_i) == "b"
    assert time.monotonic() - started < 10
    results([first.begin(rpc.shutdown), third.begin(rpc.shutdown)])
    # The process that left lives on, but its rank is free.
    results([third.begin(join, "b", 1, 2, store.port), second.begin(join, "c", 0, 2, store.port)])
    assert second.do(call, "b", functions.who_am_i) == "b"


@pytest.mark.parametrize("rank", [-1, 2, 70_000])
def test_a_rank_out_of_range_is_refused(start: Start, rank: int) -> None:
    [error] = join_all([start()], ("a", rank, 2))
    assert isinstance(error, rpc.RendezvousError)
    assert "ranks go from 0 to 1" in str(error)


@pytest.mark.parametrize("name", ["", "with space", "x" * 200, "slash/"])
def test_a_bad_name_is_refused(start: Start, name: str) -> None:
    [error] = join_all([start()], (name, 0, 1))
    assert isinstance(error, ValueError)
    assert "Worker name must" in str(error)


def test_a_worker_with_another_key_or_none_is_told_to_all_at_once(start: Start) -> None:
    for theirs, words in ((b"x" * 32, "has another key"), (None, "was given no key")):
        store = serve_store()
        a, b = start(), start()
        found = failures(
            [
                a.begin(join, "a", 0, 2, store.port, key=KEY),
                b.begin(join, "b", 1, 2, store.port, key=theirs),
            ]
        )
        assert all(isinstance(error, rpc.RendezvousError) for error in found)
        assert all(words in str(error) for error in found), found
        assert not any(KEY.decode() in str(error) for error in found)


def test_a_short_key_and_a_key_file_that_others_can_read_are_refused(
    start: Start, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/meeting"
    with pytest.raises(JobKeyError, match="at least 16"):
        start().do(init, "a", rank=0, world_size=1, key=b"short", init_method=url)
    path = tmp_path / "key"
    path.write_text(KEY.hex())
    path.chmod(0o644)
    with pytest.raises(JobKeyError, match="chmod 600"):
        start().do(
            init,
            "a",
            {"TELEGRAD_KEY_FILE": str(path)},
            rank=0,
            world_size=1,
            init_method=url,
        )


def test_a_missing_worker_is_named_after_the_join_timeout(start: Start, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    with pytest.raises(rpc.RendezvousError, match="waited 1 s for rank 1 of 2"):
        start().do(init, "a", rank=0, world_size=2, init_method=url, join_timeout=1.0)


@pytest.mark.parametrize(
    ("rank", "words"),
    [(0, "give all workers another"), (1, "did not answer: .*is it what listens")],
)
def test_a_port_at_which_no_store_listens_is_named_within_the_join_timeout(
    start: Start, rank: int, words: str
) -> None:
    process = start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(rpc.RendezvousError, match=f"'a'.*{url}.*{words}") as raised:
            process.do(init, "a", rank=rank, world_size=2, init_method=url, join_timeout=1.0)
        assert time.monotonic() - started < 5
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///no/such/directory/meeting", "there is no directory '/no/such/directory'"),
        ("pigeon://roof", "give 'env://', 'tcp://host:port' or 'file:///path'"),
        ("tcp://127.0.0.1", "the same init_method"),
        (None, "set MASTER_ADDR"),
    ],
)
def test_an_init_method_that_names_no_store_is_refused(
    url: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    started = time.monotonic()
    with pytest.raises(rpc.RendezvousError, match=words):
        rpc.init_rpc("a", rank=0, world_size=1, init_method=url, join_timeout=5.0)
    assert time.monotonic() - started < 5


def test_an_address_that_is_not_ours_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is not an address of this host"):
        start().do(
            init, "a", rank=0, world_size=1, init_method=f"file://{tmp_path}/m", host="192.0.2.1"
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transports": ("tcp",)}, "give host="),
        ({"transports": ("carrier pigeon",)}, "some of"),
        ({"transports": ()}, "some of"),
        ({"trust": "blind"}, "'code' or 'data'"),
        ({"limits": 5}, r"limits=5: give a telegrad\.rpc\.Limits"),
        ({"world_size": 0}, "world_size=0: .* at least 1"),
        ({"world_size": -3}, "world_size=-3: .* at least 1"),
        ({"world_size": "2"}, "world_size='2' is a str: give a whole number"),
        ({"rank": "0"}, "rank='0' is a str: give a whole number"),
        ({"rank": True}, "rank=True is a bool: give a whole number"),
        ({"rank": -1, "world_size": None}, "rank=-1: .* at least 0"),
        ({"life": -1}, "life=-1: .* at least 0"),
        ({"rpc_timeout": -1}, "rpc_timeout=-1: .* 0 for no bound"),
        ({"rpc_timeout": math.nan}, "rpc_timeout=nan: .* 0 for no bound"),
        ({"rpc_timeout": "x"}, "rpc_timeout='x' is a str"),
        ({"join_timeout": -1}, "join_timeout=-1: .* greater than 0"),
        ({"join_timeout": math.inf}, "join_timeout=inf: .* greater than 0"),
        ({"liveness": -1}, "liveness=-1: .* greater than 0"),
        ({"liveness": 0}, "liveness=0: .* greater than 0"),
        ({"key": "x" * 32}, "key is a str: give bytes"),
        ({"store": "here"}, "store='here': give one of torch's stores"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        init("a", **({"rank": 0, "world_size": 1} | options))
    assert "xxxx" not in str(raised.value)


@pytest.mark.parametrize(("name", "number"), [(3, 1), (None, 1), ("a", "1"), ("a", 1.0)])
def test_a_worker_info_has_a_string_and_a_whole_number(name: Any, number: Any) -> None:
    with pytest.raises(InvalidWorker, match="must be a"):
        rpc.WorkerInfo(name, number)


def test_a_second_init_and_a_call_before_init_or_after_shutdown_are_refused(start: Start) -> None:
    process = start()
    store = serve_store()
    with pytest.raises(rpc.NotInitialized, match="init_rpc"):
        process.do(call, "a", functions.nothing)
    with pytest.raises(rpc.NotInitialized):
        process.do(rpc.shutdown)
    with pytest.raises(rpc.NotInitialized):
        process.do(rpc.RRef, 1)
    process.do(join, "a", 0, 1, store.port)
    with pytest.raises(rpc.TelegradError, match="already initialized"):
        process.do(join, "a", 0, 1, store.port)
    assert process.do(call, "a", functions.who_am_i) == "a"
    process.do(rpc.shutdown)
    with pytest.raises(rpc.NotInitialized):
        process.do(call, "a", functions.nothing)
    process.do(join, "a", 0, 1, store.port)
    assert process.do(call, 0, functions.who_am_i) == "a"


# Leaving.


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


def begin_call(to: str, function: Any, *args: Any, **options: Any) -> None:
    functions.kept = rpc.rpc_async(to, function, args=args, **options)


def outcome_of_begun() -> Any:
    return functions.kept.wait()


def test_a_shutdown_that_others_do_not_join_ends_at_its_timeout(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    seconds, error = job["a"].do(timed_shutdown, timeout=0.5)
    assert isinstance(error, rpc.CallTimeout)
    assert "not every worker has called shutdown" in str(error)
    assert 0.5 <= seconds < 3
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
        assert seconds < 1 + 2.0


def test_callers_that_gave_up_do_not_hold_a_shutdown_up(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    with pytest.raises(rpc.CallTimeout):
        job["a"].do(call, "b", functions.wait_event, "never", timeout=0.1)
    leaving = [job[name].begin(timed_shutdown) for name in "ab"]
    for seconds, error in results(leaving):
        assert error is None
        assert seconds < 10


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
        assert seconds < 5


def test_calls_of_a_worker_that_leaves_end_with_job_closed(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(begin_call, "b", functions.wait_event, "never")
    job["a"].do(rpc.shutdown, graceful=False)
    with pytest.raises(rpc.JobClosed, match="'a' shut down before the answer came"):
        job["a"].do(outcome_of_begun)


def interrupted_wait(to: str) -> str:
    """Wait for a call until SIGINT comes; then call again."""
    try:
        rpc.rpc_sync(to, functions.announce_and_wait, args=("interrupt me", "never"), timeout=0)
    except KeyboardInterrupt:
        return str(rpc.rpc_sync(to, functions.who_am_i))
    raise AssertionError("not interrupted")


def test_a_wait_is_interrupted_by_ctrl_c_and_calls_go_on(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    waiting = job["a"].begin(interrupted_wait, "b")
    job["c"].do(call, "b", functions.wait_event, "interrupt me")
    job["a"].signal(signal.SIGINT)
    assert waiting.result(10) == "b"


def interrupted_behind_a_reader(to: str) -> list[Any]:
    """The main thread waits while another one reads, and is interrupted."""
    import threading

    answers: list[Any] = []
    reader = threading.Thread(
        target=lambda: answers.append(rpc.rpc_sync(to, functions.wait_event, args=("reader",)))
    )
    reader.start()
    while not rpc.debug_info()["calls in flight"]:
        time.sleep(0.001)
    time.sleep(0.05)
    try:
        rpc.rpc_sync(to, functions.announce_and_wait, args=("second", "never"), timeout=0)
    except KeyboardInterrupt:
        rpc.rpc_async(to, functions.set_event, args=("reader",)).wait()
    reader.join(20)
    answers.append(rpc.rpc_sync(to, functions.who_am_i, timeout=10))
    return answers


def test_an_interrupted_wait_does_not_keep_others_from_their_replies(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    waiting = job["a"].begin(interrupted_behind_a_reader, "b")
    job["c"].do(call, "b", functions.wait_event, "second")
    time.sleep(0.05)
    job["a"].signal(signal.SIGINT)
    assert waiting.result(40) == ["reader", "b"]


def test_a_job_whose_workers_were_killed_leaves_nothing_once_another_starts(
    make_job: MakeJob,
) -> None:
    parent = Path(os.environ["XDG_RUNTIME_DIR"])
    before = set(parent.glob("telegrad-*"))
    killed = make_job("a", "b")
    [left] = set(parent.glob("telegrad-*")) - before
    killed.abandon()
    assert any(left.glob("*.sock"))
    os.utime(left, (0, 0))
    make_job("a", "b")
    assert not left.exists()


def test_the_last_worker_removes_the_sockets_of_those_that_were_killed(make_job: MakeJob) -> None:
    parent = Path(os.environ["XDG_RUNTIME_DIR"])
    before = set(parent.glob("telegrad-*"))
    job = make_job("a", "b")
    [made] = set(parent.glob("telegrad-*")) - before
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
    command = [sys.executable, "-c", EXITS_DURING_A_CALL, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (3, "")


def join_while_the_directory_goes(name: str, port: int) -> None:
    """Another worker that leaves takes the directory along, before this one listens in it."""
    host_id = rendezvous.host_id

    def host_id_after_loss(directory: Path) -> str:
        rendezvous.host_id = host_id
        shutil.rmtree(directory)
        return host_id(directory)

    rendezvous.host_id = host_id_after_loss
    join(name, None, None, port)


def test_a_worker_whose_directory_goes_before_it_listens_has_a_job(start: Start) -> None:
    store = serve_store()
    a, b = start(), start()
    a.do(join_while_the_directory_goes, "a", store.port)
    b.do(join, "b", None, None, store.port)
    assert b.do(call, "a", functions.who_am_i) == "a"
