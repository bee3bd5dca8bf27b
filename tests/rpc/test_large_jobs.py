"""In a job of many workers nobody looks at all of them for each of them."""

from __future__ import annotations

import pytest

from telegrad import rpc
from telegrad.rpc.closing import Closing
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import RendezvousError
from telegrad.rpc.members import Member, Members
from telegrad.rpc.node import _services
from telegrad.rpc.rendezvous import _problem
from telegrad.rpc.worker import WorkerInfo
from telegrad.testing import simulate

WORKERS = 60


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a worker looks at all the others."""
    made: list[int] = []
    for method in ("live", "members"):
        original = getattr(Members, method)

        def counted(self: Members, original: object = original) -> object:
            made.append(1)
            return original(self)  # type: ignore[operator]

        monkeypatch.setattr(Members, method, counted)
    monkeypatch.setitem(_services, "closing", Closing)
    return made


NAMES = [f"worker{number}" for number in range(WORKERS)]


def make() -> int:
    return 1


def leave() -> None:
    current_node().services["closing"].close(0)


def test_the_worker_that_all_meet_at_does_not_look_at_all_of_them_for_each(
    looks: list[int],
) -> None:
    result = simulate(dict.fromkeys(NAMES, leave), NAMES)
    rounds = result.messages / (2 * WORKERS)
    # Each finds the one with the lowest id once a round; whether all are there is asked once.
    assert len(looks) <= (WORKERS + 2) * rounds


def test_a_reference_does_not_cost_a_look_at_all_workers(looks: list[int]) -> None:
    def main() -> None:
        for _ in range(20):
            rpc.remote(NAMES[1], make).to_here()

    simulate(main, NAMES)
    assert len(looks) <= 2, "the two that take part learn once who there is"


def test_who_is_lost_to_one_worker_is_not_lost_to_another_that_shares_the_list() -> None:
    members = Members([Member(WorkerInfo(name, i), 1) for i, name in enumerate("abc")])
    mine, yours = members.seen_by_another(), members.seen_by_another()
    mine.lost(1)
    assert mine.live() == {0, 2}
    assert mine.fewest_live() == 2
    assert yours.live() == {0, 1, 2}


def test_a_name_that_two_of_many_workers_have_is_found() -> None:
    names = [f"worker{number}" for number in range(10_000)]
    assert _problem(names) is None
    problem = _problem([*names, "worker77"])
    assert problem is not None
    assert "'worker77'" in str(RendezvousError(problem))
