"""References when a worker is lost: what it held, what it owned, and what it passed on."""

from __future__ import annotations

import pytest

from telegrad.rpc.errors import ReferenceLost, WorkerLost
from telegrad.rpc.reference_messages import ForkId, Register, Transfer
from telegrad.rpc.references import Failed, Lost, State
from tests.rpc.reference_job import ANN, BOB, CAT, OWNER, Job, a_fork_of


def test_a_promised_value_fails_when_the_worker_that_promised_it_is_lost():
    job = Job()
    ann, bob, owner = job.cores[ANN], job.cores[BOB], job.cores[OWNER]
    created = ann.create_remote(OWNER)
    onward = ann.share(created.fork, BOB)
    bob.arrive(onward)
    job.deliver_all()
    owner.worker_lost(ANN, "power cut")
    job.collect()
    assert Failed(created.reference) in job.events[OWNER]
    error = owner.error(created.reference)
    assert isinstance(error, ReferenceLost)
    assert "Worker 1 was lost (power cut)" in str(error)
    with pytest.raises(WorkerLost):
        owner.create_requested(created)


def test_references_of_a_lost_owner_fail_with_the_reason():
    job = Job()
    _, fork = a_fork_of(job, ANN)
    ann, bob = job.cores[ANN], job.cores[BOB]
    onward = ann.share(fork, BOB)
    ann.worker_lost(OWNER, "power cut")
    job.collect()
    [lost] = [event for event in job.events[ANN] if isinstance(event, Lost)]
    assert lost.fork == fork
    assert "Worker 0, which owns this value, is lost (power cut)" in str(lost.error)
    with pytest.raises(ReferenceLost):
        ann.share(fork, BOB)
    with pytest.raises(WorkerLost, match="worker 0"):
        ann.create_remote(OWNER)
    bob.worker_lost(OWNER, "power cut")
    assert not bob.arrive(onward), "it arrives, but lost"
    bob.drop(onward.fork)
    ann.drop(fork)
    assert not any(ann.debug_info().values())
    assert not any(bob.debug_info().values())


def test_a_worker_that_left_with_nothing_in_its_hands_costs_no_message():
    job = Job()
    for core in job.cores:
        core.worker_lost(CAT, "left")
    job.collect()
    assert not any(job.posts.values())


def test_holds_of_a_lost_worker_go_when_every_survivor_is_fenced():
    job = Job()
    reference, _ = a_fork_of(job, ANN)
    job.cores[OWNER].worker_lost(ANN, "gone")
    job.cores[BOB].worker_lost(ANN, "gone")
    job.deliver_all()
    assert not job.dropped(reference)
    assert job.cores[OWNER].debug_info()["fences"] == 1
    job.cores[CAT].worker_lost(ANN, "gone")
    job.deliver_all()
    assert job.dropped(reference)


def test_what_a_dying_worker_passed_on_is_registered_before_its_own_hold_goes():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    onward = job.cores[ANN].share(fork, BOB)
    for worker in (OWNER, CAT):
        job.cores[worker].worker_lost(ANN, "gone")
    job.deliver_all()
    job.cores[BOB].arrive(onward)
    job.cores[BOB].worker_lost(ANN, "gone")
    job.deliver_all()
    assert not job.dropped(reference)
    assert job.cores[BOB].confirmed(onward.fork)


def on_its_way_through_bob(job: Job, fork: ForkId) -> Transfer:
    """Ann gives it to Bob, and he to Cat. He dies before his own registration leaves."""
    to_bob = job.cores[ANN].share(fork, BOB)
    job.cores[BOB].arrive(to_bob)
    to_cat = job.cores[BOB].share(to_bob.fork, CAT)
    job.cores[BOB].take_actions()
    return to_cat


def test_a_fence_also_waits_for_what_went_through_a_second_lost_worker():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    to_cat = on_its_way_through_bob(job, fork)
    for lost in (BOB, ANN):
        job.cores[OWNER].worker_lost(lost, "gone")
    job.cores[CAT].worker_lost(ANN, "gone")
    job.deliver_all()
    assert not job.dropped(reference), "Cat may still get it from Bob"
    job.cores[CAT].arrive(to_cat)
    job.cores[CAT].worker_lost(BOB, "gone")
    job.deliver_all()
    assert not job.dropped(reference)
    job.cores[CAT].drop(to_cat.fork)
    job.deliver_all()
    assert job.dropped(reference)


def test_a_pin_for_a_lost_child_goes_only_when_what_the_child_passed_on_is_known():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    to_cat = on_its_way_through_bob(job, fork)
    job.cores[ANN].drop(fork)
    for survivor in (OWNER, ANN):
        job.cores[survivor].worker_lost(BOB, "gone")
    job.deliver_all()
    assert job.cores[ANN].debug_info()["pins"] == 0
    assert not job.dropped(reference)
    job.cores[CAT].arrive(to_cat)
    job.cores[CAT].worker_lost(BOB, "gone")
    job.deliver_all()
    assert not job.dropped(reference)
    assert job.cores[CAT].confirmed(to_cat.fork)


def test_nothing_goes_to_or_comes_from_a_lost_worker():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    onward = job.cores[ANN].share(fork, BOB)
    bob = job.cores[BOB]
    bob.worker_lost(ANN, "gone")
    with pytest.raises(WorkerLost, match="ignore the message"):
        bob.arrive(onward)
    bob.receive(ANN, Register(onward, ANN))
    assert not any(bob.debug_info().values())
    owner = job.cores[OWNER]
    owner.worker_lost(ANN, "gone")
    with pytest.raises(WorkerLost, match="No reference can go to worker 1"):
        owner.share(owner.create_local(), ANN)
    assert owner.state(reference) is State.READY
