"""Workers that lose each other agree on who goes, whatever was cut."""

from __future__ import annotations

import itertools

import pytest

from telegrad.rpc.agreement import Verdict, judge


def outcome(workers: int, cuts: frozenset[frozenset[int]]) -> set[frozenset[int]]:
    """Let everyone judge everyone whom they do not hear; the groups that go on together."""
    everyone = range(workers)

    def hears(one: int, other: int) -> bool:
        return one != other and frozenset((one, other)) not in cuts

    leaving: set[int] = set()
    lost: dict[int, set[int]] = {worker: set() for worker in everyone}
    for me, suspect in itertools.permutations(everyone, 2):
        if hears(me, suspect):
            continue
        heard = {other for other in everyone if hears(me, other)}
        silent = set(everyone) - heard - {me}
        elsewhere = any(hears(other, suspect) for other in heard)
        match judge(me, suspect, elsewhere, heard, silent):
            case Verdict.LOSE:
                lost[me].add(suspect)
            case Verdict.EXPEL:
                for other in (me, *heard):
                    lost[other].add(suspect)
            case Verdict.LEAVE:
                leaving.add(me)
    groups = set()
    for me in set(everyone) - leaving:
        with_me = {
            other
            for other in set(everyone) - leaving
            if other not in lost[me] and me not in lost[other] and hears(me, other)
        }
        groups.add(frozenset({me, *with_me}))
    return groups


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6])
def test_when_one_way_is_cut_the_one_with_the_higher_id_goes(workers: int) -> None:
    for pair in itertools.combinations(range(workers), 2):
        groups = outcome(workers, frozenset({frozenset(pair)}))
        assert groups == {frozenset(range(workers)) - {max(pair)}}


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6])
def test_when_the_job_falls_into_two_parts_exactly_one_goes_on(workers: int) -> None:
    everyone = frozenset(range(workers))
    for size in range(1, workers):
        for part in map(frozenset, itertools.combinations(everyone, size)):
            rest = everyone - part
            cuts = frozenset(frozenset((one, other)) for one in part for other in rest)
            larger = max(part, rest, key=lambda side: (len(side), -min(side)))
            assert outcome(workers, cuts) == {larger}


@pytest.mark.parametrize("workers", [3, 4, 5])
def test_whatever_is_cut_no_two_workers_go_on_that_count_each_other_as_lost(workers: int) -> None:
    ways = [frozenset(pair) for pair in itertools.combinations(range(workers), 2)]
    for count in range(len(ways) + 1):
        for cuts in map(frozenset, itertools.combinations(ways, count)):
            groups = outcome(workers, cuts)
            assert len(groups) <= 1, (sorted(map(sorted, cuts)), groups)
