"""References that are made, handed out, passed on and dropped: small stories."""

from __future__ import annotations

import pytest

from telegrad.rpc.reference_messages import ForkId, Gone, ReferenceId, Register, Transfer, Unpin
from telegrad.rpc.references import Confirmed, Lost, Post, References, State
from tests.rpc.reference_job import ANN, BOB, OWNER, Job, a_fork_of


def test_numbers_come_from_one_counter_and_remote_takes_two():
    core = References(3)
    assert core.create_local() == ReferenceId(owner=3, created_on=3, number=0)
    assert core.create_remote(1) == (ReferenceId(1, 3, 1), ForkId(3, 2))
    assert core.create_local() == ReferenceId(3, 3, 3)


def test_a_value_goes_with_the_last_of_its_owners_objects():
    job = Job()
    owner = job.cores[OWNER]
    reference = owner.create_local()
    assert owner.arrive(owner.share(reference, OWNER))
    owner.drop(reference)
    assert not job.dropped(reference)
    owner.drop(reference)
    assert job.dropped(reference)
    assert owner.state(reference) is State.GONE


def test_what_the_owner_hands_out_is_confirmed_and_held_while_it_travels():
    job = Job()
    owner, ann = job.cores[OWNER], job.cores[ANN]
    reference = owner.create_local()
    transfer = owner.share(reference, ANN)
    owner.drop(reference)
    assert not job.dropped(reference)
    assert ann.arrive(transfer)
    assert ann.confirmed(transfer.fork)
    ann.drop(transfer.fork)
    job.deliver_all()
    assert job.dropped(reference)


def test_a_message_that_never_left_holds_nothing():
    job = Job()
    owner = job.cores[OWNER]
    reference = owner.create_local()
    transfer = owner.share(reference, ANN)
    owner.drop(reference)
    owner.unshare(transfer)
    assert job.dropped(reference)


def test_a_holder_that_passes_on_and_drops_at_once_is_kept_until_the_child_is_known():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    ann, bob = job.cores[ANN], job.cores[BOB]
    onward = ann.share(fork, BOB)
    ann.drop(fork)
    job.deliver_all()
    assert ann.debug_info()["pins"] == 1
    assert not bob.arrive(onward)
    job.deliver_all()
    assert Confirmed(onward.fork) in job.events[BOB]
    assert ann.debug_info() == References(ANN).debug_info()
    assert not job.dropped(reference)
    bob.drop(onward.fork)
    job.deliver_all()
    assert job.dropped(reference)


def test_a_reference_that_goes_home_while_its_sender_drops_it_is_not_lost():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    ann, owner = job.cores[ANN], job.cores[OWNER]
    homeward = ann.share(fork, OWNER)
    ann.drop(fork)
    job.deliver_all()
    assert not job.dropped(reference)
    assert owner.arrive(homeward)
    job.deliver_all()
    assert not job.dropped(reference)
    owner.drop(reference)
    assert job.dropped(reference)


def test_a_holder_may_send_a_reference_to_itself():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    ann = job.cores[ANN]
    again = ann.share(fork, ANN)
    ann.drop(fork)
    ann.arrive(again)
    job.deliver_all()
    assert ann.confirmed(again.fork)
    assert not job.dropped(reference)
    ann.drop(again.fork)
    job.deliver_all()
    assert job.dropped(reference)


@pytest.mark.parametrize("to", [OWNER, ANN, BOB])
def test_a_refused_transfer_leaves_nothing_behind(to: int):
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    onward = job.cores[ANN].share(fork, to)
    job.cores[ANN].drop(fork)
    job.cores[to].refuse(onward)
    job.deliver_all()
    assert job.dropped(reference)
    assert all(not any(core.debug_info().values()) for core in job.cores)


def test_a_registration_of_a_value_that_is_gone_is_answered_rather_than_left_to_wait():
    owner = References(OWNER)
    reference = owner.create_local()
    owner.drop(reference)
    owner.take_actions()
    fork = ForkId(ANN, 7)
    owner.receive(BOB, Register(Transfer(reference, fork), BOB))
    assert owner.take_actions() == [Post(BOB, Gone(fork)), Post(ANN, Unpin(fork))]
    bob = References(BOB)
    bob.arrive(Transfer(reference, fork))
    bob.take_actions()
    bob.receive(OWNER, Gone(fork))
    assert [type(action) for action in bob.take_actions()] == [Lost]


def test_held_names_the_forks_that_a_shutdown_must_drop():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    ann = job.cores[ANN]
    assert ann.held() == [fork]
    ann.share(fork, BOB)
    ann.drop(fork)
    assert ann.held() == []
    assert not job.dropped(reference)
