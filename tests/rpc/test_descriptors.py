"""Descriptors: links give theirs back, and a worker that has none waits for one."""

from __future__ import annotations

import gc
import os
import resource
import time
import weakref
from collections.abc import Callable

from telegrad import rpc
from telegrad.rpc.outgoing import Outgoing
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent, call, descriptors, open_files, when_settled

MakeJob = Callable[..., Job]


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


def lose_while_mended(name: str) -> bool:
    """Whether the descriptor of a link is free although its worker was lost just when it went on
    over a new connection."""
    gc.disable()
    rpc.rpc_sync(name, functions.nothing)
    outgoing = agent()._outgoing[rpc.get_worker_info(name).id]
    assert isinstance(outgoing, Outgoing)
    stream = weakref.ref(outgoing.link.stream)
    agent().lose(outgoing.member.info.id, "for a test")
    outgoing._adopt_stream()
    del outgoing
    return when_settled(lambda: stream() is None)


def test_a_link_that_ends_while_it_is_mended_frees_its_descriptor(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(lose_while_mended, "b")


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
