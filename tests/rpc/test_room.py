"""A process that may open no more files says so, and believes no ill of others."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore

import telegrad
from telegrad import rpc
from telegrad.rpc.meeting import _MEMORY, _share_memory
from telegrad.rpc.node import current_node
from telegrad.rpc.room import is_lack
from telegrad.wire.arena import Arena
from tests.rpc import functions
from tests.rpc.fleet import Job, Nursery

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
    assert all(each.result(20) < 8 for each in asking)


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


def call_until_there_is_room(to: str) -> str:
    with room_for(0):
        answers: list[str] = []
        calling = threading.Thread(
            target=lambda: answers.append(rpc.rpc_sync(to, functions.who_am_i))
        )
        calling.start()
        calling.join(0.2)
    calling.join(10)
    return answers[0]


def test_a_call_waits_for_a_descriptor_as_long_as_a_connection_may_be_down(
    make_job: MakeJob,
) -> None:
    assert make_job("a", "b")["a"].do(call_until_there_is_room, "b") == "b"


def join_without_room(room: int) -> str:
    with room_for(room), pytest.raises(rpc.NoRoom) as caught:
        rpc.init_rpc("alone", rank=0, world_size=1, store=HashStore())
    return str(caught.value)


def run_without_room(room: int) -> str:
    with room_for(room), pytest.raises(rpc.NoRoom) as caught:
        telegrad.run(int, workers=1)
    return str(caught.value)


@pytest.mark.parametrize("room", [0, 3, 5])
def test_a_start_without_room_says_so(nursery: Nursery, room: int) -> None:
    process = nursery.start()
    assert "cannot join a job" in process.do(join_without_room, room)
    assert "cannot start a job of 2 processes" in process.do(run_without_room, room)
    assert process.end() == ""
