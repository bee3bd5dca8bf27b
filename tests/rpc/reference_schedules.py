"""Every story of references at once: jobs under random schedules, from seeds."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import accumulate

from telegrad.rpc.errors import ReferenceLost, WorkerLost
from telegrad.rpc.reference_messages import ForkId, Handle, ReferenceId, Transfer
from telegrad.rpc.references import Drop, Lost, Post, References, State


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
        self.weigh_steps(crowded)
        if not crowded and rng.random() < 0.7:
            self.hand_down()

    def weigh_steps(self, crowded: bool) -> None:
        """How likely each step is, of all that can happen and of what only brings messages."""
        deliveries = {
            self.deliver_post: self.rng.choice([0.5, 3]),
            self.deliver_carried: self.rng.choice([1, 4]),
            self.deliver_request: 0.5,
            self.deliver_reply: 0.5,
            self.hear_of_death: self.rng.choice([0.5, 2, 5]),
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
