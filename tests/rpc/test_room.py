"""A process that may open no more files says so, and believes no ill of others; one that can have
no shared memory does without."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import telegrad
from telegrad import rpc
from telegrad.rpc import meeting
from telegrad.rpc.calls import Pending
from telegrad.rpc.current import current_node
from telegrad.rpc.meeting import _MEMORY, _NO_MEMORY, _share_memory
from telegrad.rpc.room import is_lack, no_room
from telegrad.rpc.runtime import Threads
from telegrad.wire.arena import Arena, ArenaView
from tests.rpc import functions
from tests.rpc.fleet import Job, Nursery
from tests.rpc.inside import agent, descriptors, references

MakeJob = Callable[..., Job]


@contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """This process may open so many more, and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    last = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + descriptors, limits[1]))
    try:
        while last > 0:  # Numbers below may be free.
            try:
                held.append(os.dup(0))
            except OSError:
                break
        for each in held[len(held) - descriptors :]:
            os.close(each)
        del held[len(held) - descriptors :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in (*held, last):
            os.close(each)


def call_without_room(to: str) -> str:
    with room_for(0), pytest.raises(rpc.NoRoom) as caught:
        rpc.rpc_sync(to, functions.who_am_i)
    assert not rpc.debug_info()["lost workers"]
    assert rpc.rpc_sync(to, functions.who_am_i) == to
    return str(caught.value)


def test_a_call_for_which_there_is_no_descriptor_says_so_and_the_next_goes_through(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", liveness=0.3)
    told = job["a"].do(call_without_room, "b")
    assert "cannot connect to worker 'b'" in told
    assert "Raise that limit (ulimit -n)" in told


def run_out_of_time_and_room(to: str) -> int:
    """How many calls count as made after one that had neither."""
    node = current_node()

    def reach(pending: Pending) -> None:
        node.calls.expire(pending.deadline)
        raise rpc.NoRoom("for a test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent(), "_reach_for", reach)
        with pytest.raises(rpc.CallTimeout):
            rpc.rpc_sync(to, functions.echo, args=(rpc.RRef(1),), timeout=60)
    return node.calls_made() + references()["shared"]


def test_a_call_whose_time_was_up_before_there_was_room_counts_as_never_made(
    make_job: MakeJob,
) -> None:
    """Else a shutdown would wait for its end, and what it refers to would be kept."""
    assert make_job("a", "b")["a"].do(run_out_of_time_and_room, "b") == 0


def post_without_room(to: str) -> bool:
    """What others have to know and cannot be told: they are lost then."""
    worker = rpc.get_worker_info(to).id
    with room_for(0):
        current_node().post(worker, "nothing", None)
    return current_node().is_lost(worker)


def test_who_is_given_up_for_want_of_descriptors_is_told_why(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=0.3)
    assert job["b"].do(post_without_room, "a")
    with pytest.raises(rpc.WorkerLost, match=r"Raise that limit \(ulimit -n\)"):
        job["a"].do(rpc.rpc_sync, "b", functions.who_am_i)


def take_all_room() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))


def time_to_be_refused(to: str) -> float:
    started = time.monotonic()
    with pytest.raises(rpc.WorkerLost, match=r"no room: .*Raise that limit \(ulimit -n\)"):
        rpc.rpc_sync(to, functions.who_am_i)
    return time.monotonic() - started


def test_a_worker_that_cannot_let_anyone_in_says_so_when_it_has_been_so_for_long(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", "c", liveness=0.5)
    job["b"].do(take_all_room)
    asking = [job[name].begin(time_to_be_refused, "b") for name in "ac"]
    assert all(each.result(60) < 30 for each in asking)


def test_shared_memory_that_found_no_room_is_not_taken_for_none() -> None:
    """The other end would send tensors in it."""
    ours, theirs = socket.socketpair()
    arena = Arena(1 << 20)
    socket.send_fds(theirs, [_MEMORY], [arena.fd])
    # One for our own memory, one for its mapping.
    with room_for(2), pytest.raises(OSError, match="Too many open files") as caught:
        _share_memory(ours, 1 << 20)
    assert is_lack(caught.value)
    ours.close()
    theirs.close()
    arena.close()


def share(refused: dict[str, int]) -> list[tuple[bool, bool]]:
    """Whether each of two ends has memory to send in and memory to read in. `refused` says what the
    first finds in place of which kind of memory."""

    def refuse(kind: type) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            number = refused.get(kind.__name__)
            if number is not None and threading.current_thread().name.startswith("first"):
                raise OSError(number, os.strerror(number))
            return kind(*args)

        return make

    ends = socket.socketpair()
    for end in ends:
        end.settimeout(10)
    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1, "first") as first,
        ThreadPoolExecutor(1, "second") as second,
    ):
        for kind in (Arena, ArenaView):
            patch.setattr(meeting, kind.__name__, refuse(kind))
        sharing = [
            pool.submit(_share_memory, end, 1 << 20)
            for pool, end in zip((first, second), ends, strict=True)
        ]
        shared = [each.result() for each in sharing]
    for end in ends:
        end.settimeout(0.01)
        with pytest.raises(TimeoutError):
            end.recv(1)  # Nothing is left that the link would take for a frame.
    for end in ends:
        end.close()
    return [(arena is not None, view is not None) for arena, view, _ in shared]


@pytest.mark.parametrize("number", [errno.EFBIG, errno.ENOMEM, errno.ENOSPC, errno.EPERM])
def test_memory_that_cannot_be_had_is_done_without_in_its_direction_alone(number: int) -> None:
    assert share({}) == [(True, True), (True, True)]
    assert share({"Arena": number}) == [(False, True), (True, False)]
    assert share({"ArenaView": number}) == [(True, False), (False, True)]
    assert share({"Arena": number, "ArenaView": number}) == [(False, False), (False, False)]


def test_who_shares_no_memory_takes_none() -> None:
    """With data only: who shares memory can change a tensor after it was checked."""
    ours, theirs = socket.socketpair()
    arena = Arena(1 << 20)
    socket.send_fds(theirs, [_MEMORY], [arena.fd])
    theirs.sendall(_MEMORY)
    before = descriptors()
    assert _share_memory(ours, 0)[:2] == (None, None)
    assert descriptors() <= before  # What other tests left may be collected meanwhile.
    assert theirs.recv(2) == 2 * _NO_MEMORY
    ours.close()
    theirs.close()
    arena.close()


def bound_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, hard))


def bound_addresses() -> None:
    """There is room for one arena, not for two."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = pages * resource.getpagesize() + (1500 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def ways_there_and_back(to: str) -> tuple[bool, bool]:
    """Whether large tensors go to a worker, and its answers come, in shared memory."""
    for size in (10, 1 << 16, 1 << 20):
        x = torch.arange(size)
        for _ in range(3):
            assert torch.equal(rpc.rpc_sync(to, functions.echo, args=(x,)), x)
    link = agent()._outgoing[rpc.get_worker_info(to).id].link  # type: ignore[union-attr]
    return link._arena is not None, link._view is not None


@pytest.mark.parametrize(
    ("bound", "from_a", "from_b"),
    [
        (bound_files, (False, True), (True, False)),
        (bound_addresses, (True, False), (False, False)),
    ],
)
def test_a_worker_that_cannot_have_shared_memory_is_as_good_as_any_other(
    make_job: MakeJob,
    bound: Callable[[], None],
    from_a: tuple[bool, bool],
    from_b: tuple[bool, bool],
) -> None:
    job = make_job("a", "b")
    job["a"].do(bound)
    assert job["a"].do(ways_there_and_back, "b") == from_a
    assert job["b"].do(ways_there_and_back, "a") == from_b
    for name in "ab":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}
    job.close()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ENOMEM, "no memory"),
        (errno.ENOBUFS, "no buffers"),
    ],
)
def test_a_lack_is_told_by_what_there_is_too_little_of(number: int, told: str) -> None:
    cause = OSError(number, os.strerror(number))
    error = RuntimeError("a library's own words")
    error.__cause__ = cause
    for each in (cause, error):
        text = str(no_room("do a thing", each))
        assert text.startswith(f"this process cannot do a thing ({each}): ")
        assert told in text
        assert ("descriptors" in text) == (number == errno.EMFILE)


def tell_of_bounded_addresses() -> str:
    bound_addresses()
    return str(no_room("do a thing", OSError(errno.ENOMEM, "Cannot allocate memory")))


def test_a_lack_of_memory_names_the_limit_of_addresses_where_there_is_one(
    nursery: Nursery,
) -> None:
    assert "raise that limit (ulimit -v)" in nursery.start().do(tell_of_bounded_addresses)


def call_until_there_is_room(to: str) -> str:
    with room_for(0):
        answers: list[str] = []
        calling = threading.Thread(
            target=lambda: answers.append(rpc.rpc_sync(to, functions.who_am_i))
        )
        calling.start()
        calling.join(0.2)
    calling.join(30)
    return answers[0]


def test_a_call_waits_for_a_descriptor_as_long_as_a_connection_may_be_down(
    make_job: MakeJob,
) -> None:
    assert make_job("a", "b")["a"].do(call_until_there_is_room, "b") == "b"


_start = threading.Thread.start


def have_no_thread(times: int) -> None:
    """The system gives this process no thread, so many times."""
    Threads.KEPT = 0
    threads = agent().threads
    parked, threads._parked = threads._parked, []
    for each in parked:
        each.latch.release()
    left = [times]

    def start_sometimes(thread: threading.Thread) -> None:
        if thread.name == "telegrad" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        _start(thread)

    threading.Thread.start = start_sometimes  # type: ignore[method-assign]


def call_back(to: str) -> str:
    """Waits, so another thread has to read what comes meanwhile."""
    return rpc.rpc_sync(to, functions.who_am_i, timeout=20)


def futures_of(to: str, count: int) -> list[str]:
    futures = [rpc.rpc_async(to, functions.who_am_i, timeout=20) for _ in range(count)]
    return torch.futures.wait_all(futures)


def expires(to: str) -> str:
    """Nobody waits for the call itself: the watch has a thread complete its future."""
    future = rpc.rpc_async(to, functions.wait_event, args=("never",), timeout=0.2)
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(20)
    with pytest.raises(rpc.CallTimeout) as caught:
        future.wait()
    rpc.rpc_sync(to, functions.set_event, args=("never",))
    return str(caught.value)


def test_a_process_that_gets_no_thread_goes_on_when_it_gets_one(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    for each in (job["a"], job["b"]):
        each.do(have_no_thread, 10)
    assert job["a"].do(rpc.rpc_sync, "b", call_back, args=("a",), timeout=20) == "a"
    for _ in range(2):
        for each in (job["a"], job["b"]):
            each.do(have_no_thread, 10)
        assert job["a"].do(rpc.rpc_sync, "b", call_back, args=("a",), timeout=20) == "a"
        assert job["a"].do(futures_of, "b", 20) == ["b"] * 20
    job["a"].do(have_no_thread, 10)
    assert "wait_event on worker 'b' has not answered" in job["a"].do(expires, "b")
    assert not job["a"].do(rpc.debug_info)["lost workers"]


def call_without_threads(to: str) -> str:
    have_no_thread(1_000_000)
    with pytest.raises(rpc.CallTimeout) as caught:
        rpc.rpc_sync(to, functions.who_am_i, timeout=0.3)
    have_no_thread(0)
    assert rpc.rpc_sync(to, functions.who_am_i, timeout=20) == to
    return str(caught.value)


def test_a_call_for_which_there_is_no_thread_keeps_its_deadline(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert "who_am_i on worker 'b' has not answered" in job["a"].do(call_without_threads, "b")


def have_no_thread_for_coroutines() -> None:
    def start_others(thread: threading.Thread) -> None:
        if thread.name == "telegrad-coroutines":
            threading.Thread.start = _start  # type: ignore[method-assign]
            raise RuntimeError("can't start new thread")
        _start(thread)

    threading.Thread.start = start_others  # type: ignore[method-assign]


async def coroutine() -> str:
    return "done"


def test_coroutines_run_although_there_was_no_thread_for_the_first(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(rpc.rpc_sync, "b", functions.who_am_i) == "b"
    job["b"].do(have_no_thread_for_coroutines)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        job["a"].do(rpc.rpc_sync, "b", coroutine)
    assert job["a"].do(rpc.rpc_sync, "b", coroutine, timeout=20) == "done"


def join_without_a_thread() -> tuple[int, int]:
    """Descriptors before and after."""
    before = descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rpc.init_rpc("alone", rank=0, world_size=1, store=HashStore())
    after = descriptors()
    assert not rpc.is_initialized()
    rpc.init_rpc("alone", rank=0, world_size=1, store=HashStore())
    rpc.shutdown()
    return before, after


def _no_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_process_without_a_thread_for_it_is_not_left_half_joined(nursery: Nursery) -> None:
    process = nursery.start()
    process.do(join_without_a_thread)  # What is opened once stays.
    before, after = process.do(join_without_a_thread)
    assert after == before
    process.end()


def join_without_room(room: int) -> str:
    with room_for(room), pytest.raises(rpc.NoRoom) as caught:
        rpc.init_rpc("alone", rank=0, world_size=1, store=HashStore())
    return str(caught.value)


def run_without_room(room: int) -> str:
    with room_for(room), pytest.raises(rpc.NoRoom) as caught:
        telegrad.run(int, workers=1)
    return str(caught.value)


def run_without_a_thread(name: str) -> tuple[list[str], int]:
    """The processes that are left when no thread of that name can be started, and descriptors."""

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        _start(thread)

    before = descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            telegrad.run(int, workers=1)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return children, descriptors() - before


@pytest.mark.parametrize("name", ["telegrad-launch", "telegrad-join"])
def test_a_start_without_a_thread_leaves_no_process(nursery: Nursery, name: str) -> None:
    process = nursery.start()
    process.do(run_without_a_thread, name)  # What is opened once stays.
    assert process.do(run_without_a_thread, name) == ([], 0)


@pytest.mark.parametrize("room", [0, 3, 5])
def test_a_start_without_room_says_so(nursery: Nursery, room: int) -> None:
    process = nursery.start()
    assert "cannot join a job" in process.do(join_without_room, room)
    assert "cannot start a job of 2 processes" in process.do(run_without_room, room)
    assert process.end() == ""
