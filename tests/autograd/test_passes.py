"""Which passes a worker remembers."""

from __future__ import annotations

from telegrad.autograd.passes import FAILED_KEPT, Passes


def test_own_passes_are_numbered_under_the_worker() -> None:
    passes = Passes()
    assert passes.next_own(3) == 3 << 48 | 1
    assert passes.next_own(3) == 3 << 48 | 2


def test_a_bound_forgets_the_passes_of_that_initiator_only() -> None:
    passes = Passes()
    for pass_id in (1 << 48 | 1, 1 << 48 | 2, 2 << 48 | 1):
        passes.begin(pass_id)
    assert passes.over_below(1 << 48 | 2)
    assert passes.begun == (1 << 48 | 2, 2 << 48 | 1)
    assert passes.is_over(1 << 48 | 1)
    assert not passes.is_over(2 << 48 | 1)


def test_an_older_bound_changes_nothing() -> None:
    passes = Passes()
    passes.over_below(1 << 48 | 5)
    assert not passes.over_below(1 << 48 | 4)
    assert passes.is_over(1 << 48 | 4)


def test_the_bound_waits_for_the_oldest_pass_that_runs() -> None:
    passes = Passes()
    first, second = passes.next_own(1), passes.next_own(1)
    assert passes.own_over(second, failed=False) == first
    assert passes.own_over(first, failed=False) == second + 1


def test_messages_that_leave_name_the_last_pass_that_is_over() -> None:
    passes = Passes()
    passes.over_below(1 << 48 | 5)
    passes.begin(1 << 48 | 7)
    assert set(passes.known()) == {1 << 48 | 4, 1 << 48 | 7}


def test_only_the_latest_failures_are_told() -> None:
    passes = Passes()
    for _ in range(2 * FAILED_KEPT):
        last = passes.next_own(1)
        passes.own_over(last, failed=True)
    passes.next_own(1)
    failed = passes.own_history().failed
    assert len(failed) == FAILED_KEPT
    assert failed[-1] == last


def test_a_worker_remembers_few_passes_however_many_there_were() -> None:
    passes = Passes()
    for number in range(1, 1000):
        passes.over_below(1 << 48 | number)
        passes.begin(1 << 48 | number)
    assert len(passes.begun) == 1
