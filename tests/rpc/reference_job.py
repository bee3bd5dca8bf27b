"""A job of bare reference cores, for stories in which each message is delivered when it suits."""

from __future__ import annotations

from collections import defaultdict, deque

from telegrad.rpc.reference_messages import ForkId, ReferenceId
from telegrad.rpc.references import Drop, Post, References

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
