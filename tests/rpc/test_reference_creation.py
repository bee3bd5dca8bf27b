"""References to values that are yet to be made, or will never be."""

from __future__ import annotations

import pytest

from telegrad.rpc.errors import ReferenceLost, Refused
from telegrad.rpc.limits import Ledger
from telegrad.rpc.reference_messages import Gone, Release
from telegrad.rpc.references import Failed, Lost, References, State
from tests.rpc.reference_job import ANN, BOB, OWNER, Job


def test_a_remote_creation_is_unconfirmed_until_the_owner_has_its_request():
    job = Job()
    ann, owner = job.cores[ANN], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    ann.drop(created.fork)
    job.deliver_all()
    assert ann.debug_info()["unconfirmed"] == 1, "a Release now could overtake the request"
    owner.create_requested(created)
    assert owner.state(created.reference) is State.PENDING
    assert owner.settle(created.reference)
    ann.create_answered(created)
    job.deliver_all()
    assert job.dropped(created.reference)
    assert not owner.settle(created.reference), "nobody wants the value any more"


def test_a_failed_creation_keeps_its_error_while_someone_can_ask():
    job = Job()
    ann, owner = job.cores[ANN], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    owner.create_requested(created)
    error = ValueError("no")
    assert owner.fail(created.reference, error)
    assert owner.state(created.reference) is State.FAILED
    assert owner.error(created.reference) is error
    assert (owner.debug_info()["owned"], owner.debug_info()["forks"]) == (1, 1)
    ann.create_answered(created)
    ann.drop(created.fork)
    job.deliver_all()
    assert owner.error(created.reference) is None


def test_news_of_a_refused_creation_that_is_taken_after_all_leaves_nothing():
    """There was no room for the value, and then there was for the news that there is none."""
    job = Job()
    ann, owner = job.cores[ANN], job.cores[OWNER]
    for gone_first in (True, False):
        created = ann.create_remote(OWNER)
        ann.drop(created.fork)
        owner.create_requested(created)
        owner.fail(created.reference, ValueError("no room"))
        if gone_first:
            ann.receive(OWNER, Gone(created.fork, "no room"))
        ann.create_answered(created)
        ann.receive(OWNER, Gone(created.fork, "no room"))
        job.deliver_all()
        assert job.dropped(created.reference)
        assert all(not any(core.debug_info().values()) for core in job.cores)


def test_a_creation_that_was_refused_altogether_is_lost():
    job = Job()
    ann = job.cores[ANN]
    created = ann.create_remote(OWNER)
    ann.create_refused(created, "no room")
    assert [type(action) for action in ann.take_actions()] == [Lost]
    with pytest.raises(ReferenceLost, match="no room"):
        ann.share(created.fork, BOB)
    ann.drop(created.fork)
    assert not any(ann.debug_info().values())


def full_owner() -> Job:
    """The owner keeps no more than one fork for each other worker, and has one of Ann's."""
    job = Job()
    ledger = Ledger("references", 1, "owner", str)
    job.cores[OWNER] = References(OWNER, ledger=ledger)
    job.cores[OWNER].create_requested(job.cores[ANN].create_remote(OWNER))
    return job


@pytest.mark.parametrize("registered", ["before", "after"])
def test_who_was_given_a_value_whose_making_is_refused_is_told_so(registered: str):
    job = full_owner()
    created = job.cores[ANN].create_remote(OWNER)
    given = job.cores[ANN].share(created.fork, BOB)
    job.cores[BOB].arrive(given)
    if registered == "before":
        job.deliver(BOB, OWNER)
        assert job.cores[OWNER].state(created.reference) is State.PROMISED
    with pytest.raises(Refused):
        job.cores[OWNER].create_requested(created)
    job.deliver(BOB, OWNER)
    assert job.cores[OWNER].state(created.reference) is State.FAILED
    assert "keeps 1 references" in str(job.cores[OWNER].error(created.reference))
    assert Failed(created.reference) in job.events[OWNER]
    job.deliver(OWNER, BOB)
    job.cores[BOB].drop(given.fork)
    job.deliver(BOB, OWNER)
    assert job.cores[OWNER].debug_info()["owned"] == 1


def test_a_reference_to_a_value_whose_making_was_refused_comes_home_with_the_reason():
    job = full_owner()
    created = job.cores[ANN].create_remote(OWNER)
    home = job.cores[ANN].share(created.fork, OWNER)
    with pytest.raises(Refused):
        job.cores[OWNER].create_requested(created)
    job.cores[OWNER].arrive(home)
    assert job.cores[OWNER].state(created.reference) is State.FAILED
    job.cores[OWNER].drop(created.reference)
    assert job.cores[OWNER].debug_info()["owned"] == 1


def test_a_registration_of_a_value_that_has_been_is_no_promise():
    job = Job()
    created = job.cores[ANN].create_remote(OWNER)
    job.cores[OWNER].create_requested(created)
    job.cores[OWNER].settle(created.reference)
    given = job.cores[ANN].share(created.fork, BOB)
    job.cores[BOB].arrive(given)
    job.cores[OWNER].receive(ANN, Release(created))  # as a shutdown does, whatever is pinned
    job.deliver(BOB, OWNER)
    assert job.cores[OWNER].debug_info()["owned"] == 0
    job.deliver(OWNER, BOB)
    assert isinstance(job.events[BOB][-1], Lost)


def test_an_answer_to_who_left_it_to_itself_gives_the_value_up():
    job = Job()
    ann, owner = job.cores[ANN], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    owner.create_requested(created)
    ann.abandon(created)
    ann.create_answered(created)
    job.deliver_all()
    assert job.dropped(created.reference)


def test_a_value_that_has_been_is_not_waited_for():
    job = Job()
    ann, owner = job.cores[ANN], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    assert owner.state(created.reference) is State.PROMISED
    owner.create_requested(created)
    assert owner.settle(created.reference)
    ann.create_answered(created)
    ann.drop(created.fork)
    job.deliver_all()
    assert owner.state(created.reference) is State.GONE


def test_a_promise_that_was_let_go_may_still_be_kept():
    job = Job()
    ann, bob, owner = job.cores[ANN], job.cores[BOB], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    bob.arrive(onward := ann.share(created.fork, BOB))
    job.deliver_all()
    bob.drop(onward.fork)
    job.deliver_all()
    assert owner.state(created.reference) is State.PROMISED
    owner.create_requested(created)
    assert owner.state(created.reference) is State.PENDING


def test_an_abandoned_creation_leaves_nothing():
    ann = References(ANN)
    ann.abandon(ann.create_remote(OWNER))
    assert not any(ann.debug_info().values())


def test_a_registration_may_overtake_the_request_that_creates_the_value():
    job = Job()
    ann, bob, owner = job.cores[ANN], job.cores[BOB], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    onward = ann.share(created.fork, BOB)
    bob.arrive(onward)
    assert owner.state(created.reference) is State.PROMISED
    job.deliver_all()
    assert owner.state(created.reference) is State.PROMISED
    assert bob.confirmed(onward.fork)
    owner.create_requested(created)
    assert owner.state(created.reference) is State.PENDING
