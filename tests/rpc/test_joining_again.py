"""A store that has seen attempts and jobs before is in nobody's way: workers meet in it again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import rpc
from telegrad.rpc import vitals
from telegrad.rpc.noticeboard import Noticeboard, WaitedInVain
from telegrad.rpc.rooms import Room, open_room
from tests.rpc import functions
from tests.rpc.fleet import (
    Process,
    client_of,
    failures,
    free_port,
    init,
    join,
    results,
    serve_store,
)
from tests.rpc.inside import call

Start = Callable[[], Process]


def shut_down_all(processes: list[Process]) -> None:
    results([process.begin(rpc.shutdown) for process in processes])


def place(kind: str, tmp_path: Path) -> dict[str, Any]:
    if kind == "file":
        return {"init_method": f"file://{tmp_path}/meeting"}
    return {"init_method": f"tcp://127.0.0.1:{free_port()}"}


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_who_waited_in_vain_meets_the_others_at_the_second_attempt(
    start: Start, kind: str, tmp_path: Path
) -> None:
    processes, where = [start(), start()], place(kind, tmp_path)
    for _ in range(2):
        with pytest.raises(rpc.RendezvousError, match=r"waited 0\.5 s for"):
            processes[0].do(init, "w0", rank=0, world_size=2, join_timeout=0.5, **where)
    results(
        [
            process.begin(init, f"w{rank}", rank=rank, world_size=2, **where)
            for rank, process in enumerate(processes)
        ]
    )
    assert processes[1].do(call, "w0", functions.who_am_i) == "w0"
    shut_down_all(processes)


def try_until_joined(name: str, rank: int, size: int, port: int, seconds: float) -> int:
    """How many attempts it took."""
    store = client_of(port)
    until = time.monotonic() + 40
    for attempt in range(1, 1000):
        try:
            rpc.init_rpc(name, rank=rank, world_size=size, store=store, join_timeout=seconds)
        except rpc.RendezvousError:
            if time.monotonic() > until:
                raise
        else:
            return attempt
    raise AssertionError("too many attempts")


def test_workers_that_try_again_each_in_its_own_time_meet(start: Start) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    patience = random.Random(seed)
    store, processes = serve_store(), [start() for _ in range(4)]
    trying = []
    for rank, process in enumerate(processes):
        seconds = patience.uniform(0.3, 2.0)
        trying.append(process.begin(try_until_joined, f"w{rank}", rank, 4, store.port, seconds))
        # The others have given up before the last one comes.
        time.sleep(patience.uniform(0, 1.5))
    results(trying)
    assert processes[3].do(call, "w1", functions.bounce, 8, ["w0", "w1", "w2", "w3"]) == 8
    shut_down_all(processes)


def test_who_waits_meets_one_that_fails_and_tries_again(start: Start) -> None:
    store, processes = serve_store(), [start(), start(), start()]
    waiting = [processes[rank].begin(join, f"w{rank}", rank, 3, store.port) for rank in (0, 2)]
    store.wait(["telegrad/visitor of 0"])
    store.wait(["telegrad/visitor of 2"])
    with pytest.raises(OSError, match="not an address of this host"):
        processes[1].do(join, "w1", 1, 3, store.port, host="192.0.2.1")
    processes[1].do(join, "w1", 1, 3, store.port)
    results(waiting)
    assert processes[0].do(call, "w2", functions.who_am_i) == "w2"
    shut_down_all(processes)


@pytest.mark.parametrize("dies", [0, 1])
def test_who_dies_while_it_waits_is_replaced_by_one_that_is_started_anew(
    start: Start, dies: int
) -> None:
    store, processes = serve_store(), [start(), start(), start()]
    waiting = {
        rank: processes[rank].begin(join, f"w{rank}", rank, 3, store.port) for rank in (0, 1)
    }
    store.wait(["telegrad/1/job"])
    store.wait(["telegrad/1/worker 1"])
    processes[dies].kill()
    del waiting[dies]
    processes[dies] = start()
    results(
        [
            *waiting.values(),
            *(processes[r].begin(join, f"w{r}", r, 3, store.port) for r in (dies, 2)),
        ]
    )
    assert processes[2].do(call, f"w{dies}", functions.who_am_i) == f"w{dies}"
    shut_down_all(processes)


def test_a_job_of_another_size_follows_jobs_that_ended_or_were_killed(start: Start) -> None:
    store, processes = serve_store(), [start(), start(), start()]
    for size in (2, 2, 3):
        present = processes[:size]
        results([p.begin(join, f"w{r}", r, size, store.port) for r, p in enumerate(present)])
        assert present[0].do(call, "w1", functions.who_am_i) == "w1"
        shut_down_all(present)
    processes[0].begin(join, "w0", 0, 3, store.port)
    store.wait(["telegrad/4/job"])
    processes[0].kill()
    processes[0] = start()
    # Rank 1 finds what the dead rank 0 wrote, of a job of another size.
    waiting = processes[1].begin(join, "w1", 1, 2, store.port)
    store.wait(["telegrad/4/ready"])
    processes[0].do(join, "w0", 0, 2, store.port)
    waiting.result(60)
    shut_down_all(processes[:2])


def test_what_a_dead_rank_0_wrote_is_not_said_of_a_living_one(start: Start) -> None:
    store, first, second = serve_store(), start(), start()
    first.begin(join, "w0", 0, 3, store.port)
    store.wait(["telegrad/1/job"])
    first.kill()
    with pytest.raises(rpc.RendezvousError, match=r"Rank 0 did not answer for 0\.5 s.*try again"):
        second.do(join, "w1", 1, 2, store.port, join_timeout=0.5)
    with pytest.raises(rpc.RendezvousError, match="Rank 0 was worker 'w0', which has died"):
        second.do(join, "w1", 1, 2, store.port, join_timeout=0.5)


def test_a_worker_too_many_is_told_where_the_others_are(start: Start) -> None:
    store, processes = serve_store(), [start(), start(), start()]
    results([p.begin(join, f"w{r}", r, 2, store.port) for r, p in enumerate(processes[:2])])
    with pytest.raises(rpc.RendezvousError, match="Rank 0 is worker 'w0', in a job of 2 workers"):
        processes[2].do(join, "w2", 2, 3, store.port, join_timeout=0.5)
    shut_down_all(processes[:2])


def test_ranks_that_are_given_out_are_given_out_anew_in_each_job(start: Start) -> None:
    store, processes = serve_store(), [start(), start()]
    for _ in range(2):
        results(
            [p.begin(join, n, None, 2, store.port) for n, p in zip("ab", processes, strict=True)]
        )
        assert sorted(p.do(rpc.get_worker_info).id for p in processes) == [0, 1]
        shut_down_all(processes)
    processes[0].begin(join, "a", None, 2, store.port)
    store.wait(["telegrad/3/seat 0"])
    processes[0].kill()
    processes[0] = start()
    results([p.begin(join, n, None, 2, store.port) for n, p in zip("ab", processes, strict=True)])
    shut_down_all(processes)


def test_a_worker_comes_back_to_the_room_of_its_job_though_there_were_others(start: Start) -> None:
    store, processes = serve_store(), [start(), start()]
    with pytest.raises(rpc.RendezvousError):
        processes[0].do(join, "w0", 0, 2, store.port, life=0, join_timeout=0.5)
    results([p.begin(join, f"w{r}", r, 2, store.port, life=0) for r, p in enumerate(processes)])
    processes[1].kill()
    processes[1] = start()
    processes[1].do(join, "w1", 1, 2, store.port, life=1)
    assert processes[0].do(rpc.wait_for_worker, 1) == rpc.WorkerInfo("w1", 3)
    assert processes[1].do(call, "w0", functions.who_am_i) == "w0"
    shut_down_all(processes)


def see_nobody() -> None:
    """As on a host of its own: no other process can be seen."""
    vitals.Process.vital = lambda self: vitals.Vital.UNKNOWN  # type: ignore[method-assign]


def test_two_on_different_hosts_with_one_rank_do_not_drive_each_other_from_room_to_room(
    start: Start,
) -> None:
    store, processes = serve_store(), [start(), start(), start()]
    for process in processes:
        process.do(see_nobody)
    first = processes[0].begin(join, "first", 1, 2, store.port, join_timeout=20)
    store.wait(["telegrad/visitor of 1"])
    second = processes[1].begin(join, "second", 1, 2, store.port, join_timeout=20)
    store.wait(["telegrad/2/seat 1"])
    processes[2].do(join, "zero", 0, 2, store.port)
    outcomes = failures([first, second])
    assert [error for error in outcomes if error is None] == [None]
    [error] = [error for error in outcomes if error is not None]
    assert "rank 1 is taken twice" in str(error)


def test_the_time_to_join_holds_for_a_store_that_would_wait_longer(start: Start) -> None:
    store, process = serve_store(), start()
    started = time.monotonic()
    with pytest.raises(rpc.RendezvousError, match=r"waited 0\.5 s"):
        process.do(join, "a", 0, 2, store.port, join_timeout=0.5)
    assert time.monotonic() - started < 25, "its store waits for 30 s"


def test_a_rank_of_an_open_job_that_failed_to_join_can_be_asked_for_again(start: Start) -> None:
    store, process = serve_store(), start()
    with pytest.raises(OSError, match="not an address of this host"):
        process.do(join, "a", 7, None, store.port, host="192.0.2.1")
    process.do(join, "a", 7, None, store.port)
    assert process.do(rpc.get_worker_info).id == 7
    process.do(rpc.shutdown)


# The rooms by themselves.


def board(store: dist.Store, incarnation: int, seconds: float = 5.0) -> Noticeboard:
    return Noticeboard(store, f"w{incarnation}", incarnation, seconds)


def test_a_room_has_one_outcome_whoever_writes_it() -> None:
    store = dist.HashStore()
    first, second = (Room(board(store, number), 1) for number in (1, 2))
    assert first.settle({"members": []})["members"] == []
    assert "given up" not in second.give_up()
    assert open_room(board(store, 3)).number == 2
    assert not second.board.store.check(["job"])
    third = open_room(board(store, 3))
    third.give_up()
    third.give_up()
    assert open_room(board(store, 1)).number == 3, "no room is passed by"


def test_a_room_is_left_by_those_who_wait_though_who_gave_it_up_has_died_over_it() -> None:
    store = dist.HashStore()
    Room(board(store, 1), 1).board.store.compare_set("members", "", '{"given up": true}')
    with pytest.raises(WaitedInVain):
        Room(board(store, 2, 0.1), 1).board.get("job", "rank 0")
    assert open_room(board(store, 3)).number == 2
    assert Room(board(store, 2, 0.1), 1).board.get("job", "rank 0") == {"given up": True}
    assert Room(board(store, 2, 0.1), 1).board.get("ready", "all") == {"given up": True}
