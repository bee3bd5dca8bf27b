"""In a large job each worker knows a few others and looks up the rest. Here eight are many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import closing, rendezvous
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import RendezvousError, UnknownWorker, WorkerLost
from telegrad.rpc.members import Member, Members
from telegrad.rpc.worker import WorkerInfo
from tests.rpc.fleet import Job, Nursery

NAMES = tuple("abcdefgh")


def eight_are_many() -> None:
    rendezvous.KNOWN_TO_ALL = 4
    rendezvous.LOOKED_AFTER = 2
    closing.MISSED_AFTER = 0.2


def known() -> list[str]:
    return [member.info.name for member in current_node().members.members()]


def add(to: str | int, x: int) -> int:
    return int(rpc.rpc_sync(to, torch.add, args=(torch.tensor(x), 1)))


def add_through_info(to: str) -> int:
    return int(rpc.rpc_sync(rpc.get_worker_info(to), torch.add, args=(torch.tensor(1), 1)))


def names_of_all() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def error_of(to: str | int) -> str:
    try:
        add(to, 1)
    except (RendezvousError, UnknownWorker, WorkerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


kept: list[rpc.RRef[int]] = []


def keep(reference: rpc.RRef[int]) -> None:
    kept.append(reference)


def give_to(holder: str) -> None:
    rpc.rpc_sync(holder, keep, args=(rpc.RRef(7),))


def forks() -> int:
    current_node().values.bury()
    return int(current_node().values.debug_info()["forks"])


def lost() -> list[int]:
    return sorted(current_node().lost_workers())


@pytest.fixture
def job(nursery: Nursery) -> Iterator[Job]:
    job = Job(nursery, NAMES, before=eight_are_many)
    yield job
    job.abandon()


def test_a_worker_knows_itself_and_a_few_spread_over_the_job(job: Job) -> None:
    assert job["a"].do(known) == ["a", "c", "f"]
    assert job["h"].do(known) == ["b", "e", "h"]


def test_others_are_found_by_name_rank_and_info_and_known_from_then_on(job: Job) -> None:
    assert job["a"].do(add, "b", 1) == 2
    assert job["a"].do(add, 3, 2) == 3
    assert job["a"].do(add_through_info, "e") == 2
    assert job["a"].do(known) == ["a", "b", "c", "d", "e", "f"]
    assert job["b"].do(known) == ["a", "b", "d", "g"], "a visitor is looked up, too"
    assert job["a"].do(names_of_all) == list(NAMES)


def test_a_worker_that_is_not_in_the_job_is_told_apart(job: Job) -> None:
    assert job["a"].do(error_of, "nobody").startswith("UnknownWorker: could not find destination")
    assert "5 more" in job["a"].do(error_of, 8)


def test_all_leave_in_good_order(job: Job) -> None:
    job["b"].do(add, "g", 1)
    leaving = [process.begin(rpc.shutdown) for process in job.processes.values()]
    for each in leaving:
        each.result(60)
    for process in job.processes.values():
        assert "Traceback" not in process.end(), process.errors


def test_a_worker_that_died_unseen_does_not_hold_up_the_end(job: Job) -> None:
    assert "b" not in job["a"].do(known)
    job["b"].kill()
    leaving = [job[name].begin(rpc.shutdown) for name in NAMES if name != "b"]
    for each in leaving:
        each.result(60)


def test_the_end_survives_the_worker_that_all_meet_at(job: Job) -> None:
    leaving = [job[name].begin(rpc.shutdown) for name in NAMES if name not in "ah"]
    job["a"].kill()
    leaving.append(job["h"].begin(rpc.shutdown))
    for each in leaving:
        each.result(60)


def test_what_a_dead_worker_held_is_let_go_after_all_were_asked(job: Job) -> None:
    job["a"].do(give_to, "b")
    assert job["a"].do(forks) == 1
    job["b"].kill()
    while job["a"].do(forks):
        pass
    assert job["h"].do(lost) == [1], "h was asked, though it knew neither of the two"


def test_without_the_store_those_who_have_met_go_on_and_others_are_told(job: Job) -> None:
    job["c"].do(add, "d", 1)
    del job.store
    assert job["c"].do(add, "d", 1) == 2
    assert "the store in which the workers met does not answer" in job["c"].do(error_of, "b")
    refused = job["c"].do(error_of, "e")
    assert "'c' cannot be told from a stranger: worker 'e' cannot look up worker 2" in refused


def test_a_job_of_fixed_size_counts_those_that_are_not_known() -> None:
    me = Member(WorkerInfo("worker3", 3), 1)
    members = Members([me], lambda who: None, size=10_000)
    members.lost(0)
    assert not members.knows_all
    assert members.lowest_live() == 1
    assert members.fewest_live() == 9_999
    assert members.live() == set(range(1, 10_000))
    assert len(members) == 10_000
