"""References: small stories first, then every story at once from seeds, then broken protocols."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import accumulate

import pytest

from telegrad.rpc.errors import ReferenceLost, Refused, WorkerLost
from telegrad.rpc.limits import Ledger
from telegrad.rpc.reference_messages import (
    Fenced,
    ForkId,
    Gone,
    Handle,
    ReferenceId,
    Register,
    Release,
    Transfer,
    Unpin,
)
from telegrad.rpc.references import (
    Confirmed,
    Drop,
    Failed,
    Lost,
    Post,
    References,
    State,
    _Standing,
)

OWNER, ANN, BOB, CAT = 0, 1, 2, 3


class Job:
    """Workers whose posts wait in queues until a story delivers them."""

    def __init__(self, size: int = 4) -> None:
        self.cores = [References(me) for me in range(size)]
        for core in self.cores:
            for worker in range(size):
                core.worker_joined(worker)
        self.posts: dict[tuple[int, int], deque[object]] = defaultdict(deque)
        self.events: dict[int, list[object]] = defaultdict(list)

    def collect(self) -> None:
        for me, core in enumerate(self.cores):
            for action in core.take_actions():
                if isinstance(action, Post):
                    self.posts[me, action.to].append(action.message)
                else:
                    self.events[me].append(action)

    def deliver(self, sender: int, to: int) -> None:
        self.collect()
        while self.posts[sender, to]:
            self.cores[to].receive(sender, self.posts[sender, to].popleft())
            self.collect()

    def deliver_all(self) -> None:
        self.collect()
        while any(self.posts.values()):
            for sender, to in list(self.posts):
                self.deliver(sender, to)

    def dropped(self, reference: ReferenceId) -> bool:
        self.collect()
        return Drop(reference) in self.events[OWNER]


def a_fork_of(job: Job, holder: int) -> tuple[ReferenceId, ForkId]:
    """A value that only `holder` still refers to."""
    owner = job.cores[OWNER]
    reference = owner.create_local()
    transfer = owner.share(reference, holder)
    owner.drop(reference)
    assert job.cores[holder].arrive(transfer)
    return transfer


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


def test_a_fence_also_waits_for_what_went_through_a_second_lost_worker():
    job = Job()
    reference, fork = a_fork_of(job, ANN)
    to_bob = job.cores[ANN].share(fork, BOB)
    job.cores[BOB].arrive(to_bob)
    to_cat = job.cores[BOB].share(to_bob.fork, CAT)
    job.cores[BOB].take_actions()  # Bob dies before his registration leaves.
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
    to_bob = job.cores[ANN].share(fork, BOB)
    job.cores[BOB].arrive(to_bob)
    to_cat = job.cores[BOB].share(to_bob.fork, CAT)
    job.cores[BOB].take_actions()
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


class Participant:
    """A live worker of the simulation: its core, and what its user has in hand."""

    def __init__(self, me: int) -> None:
        self.core = References(me)
        self.objects: list[tuple[Handle, ReferenceId]] = []
        self.values: set[ReferenceId] = set()
        self.lost_forks: set[Handle] = set()
        self.unheard: list[int] = []


class Simulation:
    """A job under a random schedule. Posts keep their order per pair, other messages none; the
    news of a death reach each survivor at its own time, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.live: dict[int, Participant] = {}
        self.dead: list[int] = []
        self.posts: dict[tuple[int, int], deque[object]] = defaultdict(deque)
        self.carried: list[tuple[int, int, Transfer]] = []
        self.requests: list[tuple[int, int, Transfer]] = []
        self.replies: list[tuple[int, int, Transfer]] = []
        self.born: set[ReferenceId] = set()
        # Half of the jobs do everything at once. The other half hand few values on from worker to
        # worker, dropping each at once, and lose workers meanwhile: there the fences are all that
        # keeps a value, and the owner must survive to get it wrong.
        crowded = rng.random() < 0.5
        for _ in range(rng.randint(2, 6) if crowded else 5):
            self.join()
        self.length = 40 if crowded else 16
        self.hand_over = rng.choice([0.2, 0.9]) if crowded else 1.0
        self.deaths_to_come = rng.choice([0, 1, 2, 3]) if crowded else rng.choice([1, 2, 3])
        self.spared = None if crowded else 0
        self.creators = [0, 1, 2, 3, 4, 5] if crowded else [0]
        # One worker hears of everything late: the straggler whom a fence must not overlook.
        self.straggler = rng.randrange(6)
        deliveries = {
            self.deliver_post: rng.choice([0.5, 3]),
            self.deliver_carried: rng.choice([1, 4]),
            self.deliver_request: 0.5,
            self.deliver_reply: 0.5,
            self.hear_of_death: rng.choice([0.5, 2, 5]),
        }
        choices = {
            self.create_local: 1 if crowded else 0.1,
            self.create_remote: 0.5 if crowded else 0,
            self.settle: 0.1,
            self.join_late: 0.1,
            self.share: 3,
            self.drop: 1 if crowded else 0,
            self.kill: 0.5 if crowded else 1,
        }
        self.deliveries = list(deliveries), list(accumulate(deliveries.values()))
        everything = deliveries | choices
        self.everything = list(everything), list(accumulate(everything.values()))

        if not crowded and rng.random() < 0.7:
            self.hand_down()

    def hand_down(self) -> None:
        """One value goes 0, 1, 2, and is on its way to the straggler 3. Nothing else keeps it."""
        self.straggler = 3
        self.create_local()
        for giver, to in ((0, 1), (1, 2), (2, 3)):
            worker = self.live[giver]
            handle, reference = worker.objects.pop()
            transfer = worker.core.share(handle, to)
            worker.core.drop(handle)
            if to == self.straggler:
                self.carried.append((giver, to, transfer))
            else:
                self.live[to].core.arrive(transfer)
                self.live[to].objects.append((transfer.fork, reference))

    def step(self, steps: tuple[list[Callable[[], bool]], list[float]]) -> None:
        while not self.rng.choices(steps[0], cum_weights=steps[1])[0]():
            pass
        self.check_safety()

    def late(self, worker: int) -> bool:
        return worker == self.straggler and self.rng.random() < 0.8

    def run(self) -> None:
        for _ in range(self.length):
            self.step(self.everything)
        self.settle_down()
        self.check_quiescent()
        for worker in self.live.values():
            while worker.objects:
                worker.core.drop(worker.objects.pop()[0])
        self.settle_down()
        self.check_quiescent()
        for me, worker in self.live.items():
            assert not any(worker.core.debug_info().values()), f"left on {me}: {vars(worker.core)}"

    def settle_down(self) -> None:
        self.collect()
        while (
            self.carried or self.requests or self.replies or any(self.posts.values()) or self.news()
        ):
            self.step(self.deliveries)

    def collect(self) -> None:
        for me, worker in self.live.items():
            for action in worker.core.take_actions():
                match action:
                    case Post(to, message):
                        if to in self.live:
                            self.posts[me, to].append(message)
                    case Drop(reference):
                        worker.values.discard(reference)
                    case Lost(fork):
                        worker.lost_forks.add(fork)

    def check_safety(self) -> None:
        self.collect()
        wanted = {ref for worker in self.live.values() for _, ref in worker.objects}
        wanted.update(
            transfer.reference
            for sender, to, transfer in self.carried
            if sender in self.live and to in self.live
        )
        for reference in wanted & self.born:
            if owner := self.live.get(reference.owner):
                assert reference in owner.values, f"{reference} was dropped too early"

    def check_quiescent(self) -> None:
        wanted = {ref for worker in self.live.values() for _, ref in worker.objects}
        for me, worker in self.live.items():
            assert worker.values <= wanted, f"{worker.values - wanted} left on {me}"
            info = worker.core.debug_info()
            assert (info["pins"], info["fences"], info["unconfirmed"]) == (0, 0, 0), f"{me}: {info}"
            for handle, reference in worker.objects:
                if isinstance(handle, ForkId):
                    lost = reference.owner not in self.live
                    assert (handle in worker.lost_forks) == lost
                    assert worker.core.confirmed(handle) != lost
                else:
                    assert worker.core.state(reference) is not State.PROMISED

    def with_objects(self) -> list[tuple[int, Participant]]:
        return [(me, worker) for me, worker in self.live.items() if worker.objects]

    def join(self) -> None:
        me = len(self.live) + len(self.dead)
        newcomer = Participant(me)
        newcomer.unheard = list(self.dead)
        for other, worker in self.live.items():
            worker.core.worker_joined(me)
            newcomer.core.worker_joined(other)
        self.live[me] = newcomer

    def join_late(self) -> bool:
        if len(self.live) + len(self.dead) == 6:
            return False
        self.join()
        return True

    def create_local(self) -> bool:
        creators = [me for me in self.creators if me in self.live] or list(self.live)
        worker = self.live[self.rng.choice(creators)]
        reference = worker.core.create_local()
        worker.values.add(reference)
        self.born.add(reference)
        worker.objects.append((reference, reference))
        return True

    def create_remote(self) -> bool:
        me, to = self.rng.choices(list(self.live), k=2)
        if me == to:
            return False
        worker = self.live[me]
        created = worker.core.create_remote(to)
        if self.rng.random() < 0.1:
            worker.core.abandon(created)
            if self.rng.random() < 0.5:
                # Its caller was interrupted, and cannot know that the request did leave.
                self.requests.append((me, to, created))
        else:
            worker.objects.append((created.fork, created.reference))
            self.requests.append((me, to, created))
        return True

    def settle(self) -> bool:
        worker = self.rng.choice(list(self.live.values()))
        if not worker.values:
            return False
        assert worker.core.settle(self.rng.choice(sorted(worker.values)))
        return True

    def share(self) -> bool:
        if not (holders := self.with_objects()):
            return False
        me, worker = self.rng.choice(holders)
        to = self.rng.choice([*self.live, *self.dead])
        if to in (me, self.spared) and self.rng.random() < 0.7:
            return False
        handle, _ = self.rng.choice(worker.objects)
        try:
            transfer = worker.core.share(handle, to)
        except (WorkerLost, ReferenceLost):
            assert to in self.dead or handle in worker.lost_forks
            return False
        if self.rng.random() < 0.05:
            worker.core.unshare(transfer)
        elif to in self.live:
            self.carried.append((me, to, transfer))
        if self.rng.random() < self.hand_over:
            self.drop_object(worker, handle)
        return True

    def drop(self) -> bool:
        if not (holders := self.with_objects()):
            return False
        _, worker = self.rng.choice(holders)
        self.drop_object(worker, self.rng.choice(worker.objects)[0])
        return True

    def drop_object(self, worker: Participant, handle: Handle) -> None:
        index = next(i for i, (mine, _) in enumerate(worker.objects) if mine == handle)
        worker.objects.pop(index)
        worker.core.drop(handle)

    def deliver_post(self) -> bool:
        ready = [pair for pair, queue in self.posts.items() if queue]
        if not ready:
            return False
        sender, to = self.rng.choice(ready)
        self.live[to].core.receive(sender, self.posts[sender, to].popleft())
        return True

    def deliver_carried(self) -> bool:
        if not self.carried:
            return False
        index = self.rng.randrange(len(self.carried))
        sender, to, transfer = self.carried[index]
        if self.late(to):
            return False
        del self.carried[index]
        worker = self.live[to]
        if self.rng.random() < 0.05:
            worker.core.refuse(transfer)
            return True
        try:
            worker.core.arrive(transfer)
        except WorkerLost:
            assert sender in self.dead
            return True
        reference, fork = transfer
        handle = reference if reference.owner == to else fork
        worker.objects.append((handle, reference))
        return True

    def deliver_request(self) -> bool:
        if not self.requests:
            return False
        sender, to, created = self.requests.pop(self.rng.randrange(len(self.requests)))
        worker = self.live[to]
        try:
            worker.core.create_requested(created)
        except WorkerLost:
            assert sender in self.dead
            return True
        worker.values.add(created.reference)
        self.born.add(created.reference)
        if sender in self.live:
            self.replies.append((to, sender, created))
        return True

    def deliver_reply(self) -> bool:
        if not self.replies:
            return False
        _, to, created = self.replies.pop(self.rng.randrange(len(self.replies)))
        self.live[to].core.create_answered(created)
        return True

    def news(self) -> list[tuple[int, Participant]]:
        return [(me, worker) for me, worker in self.live.items() if worker.unheard]

    def hear_of_death(self) -> bool:
        if not (news := self.news()):
            return False
        me, worker = self.rng.choice(news)
        if self.late(me):
            return False
        lost = worker.unheard.pop(self.rng.randrange(len(worker.unheard)))
        worker.core.worker_lost(lost, "killed")
        return True

    def kill(self) -> bool:
        """Of what the victim sent, posts arrive up to some point and the rest by chance."""
        busy = [sender for sender, _, _ in self.carried if sender in self.live]
        victim = self.rng.choice(busy if busy and self.rng.random() < 0.7 else list(self.live))
        if not self.deaths_to_come or len(self.live) < 2 or victim == self.spared:
            return False
        self.deaths_to_come -= 1
        del self.live[victim]
        self.dead.append(victim)
        for worker in self.live.values():
            worker.unheard.append(victim)
        for (sender, to), queue in self.posts.items():
            arrives = len(queue)
            if victim in (sender, to):
                arrives = 0 if to == victim else self.rng.choice([0, self.rng.randint(0, arrives)])
            while len(queue) > arrives:
                queue.pop()
        self.carried = [message for message in self.carried if self.survives(message, victim)]
        self.requests = [message for message in self.requests if self.survives(message, victim)]
        self.replies = [message for message in self.replies if self.survives(message, victim)]
        return True

    def survives(self, message: tuple[int, int, Transfer], victim: int) -> bool:
        sender, to, _ = message
        return to != victim and (sender != victim or self.rng.random() < 0.8)


def run_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            Simulation(seed).run()
        except Exception as failure:
            raise AssertionError(f"Simulation({seed}).run() replays it") from failure


def test_lifetime_is_exact_under_random_schedules_and_deaths():
    run_seeds(range(2000))


def release_despite_pins(self: References, fork, held) -> None:
    if held.dropped and held.standing is not _Standing.UNCONFIRMED:
        del self._held[fork]
        if held.standing is _Standing.CONFIRMED:
            self._post(held.reference.owner, Release(Transfer(held.reference, fork)))


def leave_a_late_answer_alone(self: References, created: Transfer) -> None:
    self._confirm(created.fork)


def share_home_without_pin(self: References, handle, to) -> Transfer:
    transfer = share(self, handle, to)
    if transfer.reference.owner == to != self._me:
        self._unpin(transfer.fork)
    return transfer


def hand_out_without_record(self: References, handle, to) -> Transfer:
    transfer = share(self, handle, to)
    if transfer.reference.owner == self._me != to:
        del self._owned[handle].holders[transfer.fork]
    return transfer


def end_fences_at_once(self: References, lost) -> None:
    self._end_fences_if_answered()


def end_each_fence_alone(self: References) -> None:
    unanswered = {of for _, of in self._awaited}
    self._fenced.update(self._lost.keys() - unanswered)
    for reference, owned in list(self._owned.items()):
        for fork, holder in list(owned.holders.items()):
            if holder in self._fenced:
                self._release(Transfer(reference, fork))


def ask_only_about_holders(self: References) -> None:
    holders = {holder for owned in self._owned.values() for holder in owned.holders.values()}
    if not self._awaited:
        self._ask_fences(tuple((self._lost.keys() - self._fenced) & holders))


def forget_the_second_lost(self: References, lost) -> None:
    if self._awaited:
        self._awaited = {(live, of) for live, of in self._awaited if live != lost}
        self._end_fences_if_answered()
    elif self._holds_of_unfenced():
        self._begin_fences()


def answer_before_being_fenced(self: References, owner, worker) -> None:
    self._post(owner, Fenced(worker))


def unpin_lost_children(self: References, lost) -> None:
    for fork in [fork for fork, pin in self._pins.items() if pin.to == lost]:
        self._unpin(fork)


def keep_pins_of_lost_children(self: References, lost) -> None:
    pass


def accept_from_the_lost(self: References, sender) -> None:
    pass


def register_without_telling_the_parent(self: References, sender, message) -> None:
    register(self, sender, message)
    self._actions = [
        a for a in self._actions if not (isinstance(a, Post) and type(a.message) is Unpin)
    ]


def forget_to_drop(self: References, transfer) -> None:
    if owned := self._owned.get(transfer.reference):
        owned.holders.pop(transfer.fork, None)


share, register = References.share, References._register

BROKEN = [
    ("_release_if_done", release_despite_pins),
    ("create_answered", leave_a_late_answer_alone),
    ("share", share_home_without_pin),
    ("share", hand_out_without_record),
    ("_ask_fences", end_fences_at_once),
    ("_end_fences_if_answered", end_each_fence_alone),
    ("_begin_fences", ask_only_about_holders),
    ("_extend_fences", forget_the_second_lost),
    ("_answer_fence", answer_before_being_fenced),
    ("_register_for", unpin_lost_children),
    ("_register_for", keep_pins_of_lost_children),
    ("_require_not_fenced", accept_from_the_lost),
    ("_register", register_without_telling_the_parent),
    ("_release", forget_to_drop),
]


@pytest.mark.parametrize(("rule", "broken"), BROKEN, ids=[broken.__name__ for _, broken in BROKEN])
def test_the_simulation_catches_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch, rule: str, broken: Callable[..., object]
):
    monkeypatch.setattr(References, rule, broken)
    with pytest.raises(AssertionError, match="replays it"):
        run_seeds(range(3000))
