"""Joining a job: workers meet, come back, and come while others go."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc import rendezvous
from telegrad.rpc.founding import Founding
from tests.rpc import functions
from tests.rpc.fleet import Job, Process, free_port, init, join, results, serve_store
from tests.rpc.inside import call

Start = Callable[[], Process]
MakeJob = Callable[..., Job]


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


def leave_slowly() -> None:
    leave = rendezvous.Rendezvous.leave

    def slowly(visit: rendezvous.Rendezvous) -> None:
        time.sleep(0.5)
        leave(visit)

    rendezvous.Rendezvous.leave = slowly  # type: ignore[method-assign]


def leave_and_join_again(name: str, **options: Any) -> None:
    rpc.shutdown()
    rpc.init_rpc(name, **options)


def test_who_joins_again_before_rank_0_has_left_meets_it_all_the_same(start: Start) -> None:
    """Rank 0 has the server of the store: it must not end when rank 0 leaves."""
    url = f"tcp://127.0.0.1:{free_port()}"
    processes = [start(), start(), start()]
    processes[0].do(leave_slowly)
    for work in (init, leave_and_join_again, leave_and_join_again):
        joining = [
            process.begin(work, f"w{rank}", rank=rank, world_size=3, init_method=url)
            for rank, process in enumerate(processes)
        ]
        results(joining)
        assert processes[1].do(call, "w2", functions.who_am_i) == "w2"
    results([process.begin(rpc.shutdown) for process in processes])


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
    agree = Founding._agree_on_key

    def agree_and_pause(founding: Founding, *args: Any) -> Any:
        key = agree(founding, *args)
        Founding._agree_on_key = agree
        (directory / "has read").touch()
        while not (directory / "go on").exists():
            time.sleep(0.01)
        return key

    Founding._agree_on_key = agree_and_pause
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
    joining.result(60)
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
