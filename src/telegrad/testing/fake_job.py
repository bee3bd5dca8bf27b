"""A job of any size that is never started: for steps that will run on hundreds of workers.

Two parts of it are not what they seem. The workers are those of a simulation, all in this process:
remote calls, gradients and optimizers are real, only sockets and threads are replaced. And torch's
process group is its *fake* one: it has the size of the job, so ranks, meshes and DTensor are what
they will be, but its collectives move nothing. What they return has the right shape and no meaning.

So a program can be compiled for the size that it will have, and checked: that it is one graph, that
calls go where they should, that shapes fit, that every worker gets its gradients.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from telegrad.mesh.torch_private import begin_world
from telegrad.rpc.arguments import check_whole
from telegrad.rpc.errors import TelegradError
from telegrad.testing.simulation import simulate

T = TypeVar("T")


class FakeJob:
    """The workers of `fake_job`. They are called as those of `telegrad.run` are."""

    def __init__(self, size: int, rank: int) -> None:
        self.workers = ("main", *[f"worker{number}" for number in range(1, size)])
        self.rank = rank

    def run(self, main: Callable[[], T], *, seed: int = 0) -> T:
        """Run `main()` on the worker with the job's `rank`; what it returns or raises."""
        name = self.workers[self.rank]
        value: T = simulate({name: main}, self.workers, seed=seed).value
        return value


@contextmanager
def fake_job(size: int, *, rank: int = 0) -> Iterator[FakeJob]:
    """A job of `size` workers, "main", "worker1" and so on, none of which is started.

        with telegrad.testing.fake_job(512) as job:
            job.run(train)                # calls "worker511", compiles for a mesh of 512, ...

    In this block `torch.distributed` has a process group of that size, in which this process is
    `rank`. Collectives return at once; what they return is of the right shape, and nothing else.
    """
    check_whole("size", size, least=1)
    check_whole("rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"A job of {size} workers has no rank {rank}: the last is {size - 1}.")
    if dist.is_initialized():
        raise TelegradError(
            "This process already has a process group: a fake job needs its place. Call "
            "torch.distributed.destroy_process_group() first."
        )
    from telegrad.compile import guard_process_groups

    guard_process_groups()
    begin_world(secrets.randbits(62))
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield FakeJob(size, rank)
    finally:
        dist.destroy_process_group()
        # Rank and size of the world are folded into compiled functions without a guard.
        torch.compiler.reset()
