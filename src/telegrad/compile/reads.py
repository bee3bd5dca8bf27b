"""Process groups are guarded by what a compiled function reads of them, where it reads it.

Torch folds the size, the rank or the members of a process group into constants, and guards by its
type alone a group that is passed as an argument: with another one, the constants of the first are
used in silence. To guard all of a group whenever it is seen would be right, but compile again for a
group that is only passed on, or of which only the backend is asked.

So each place where Dynamo reads a group puts a guard on the outcome of that very read. Where it is
not known what is read, all of it is guarded. What must never happen: a read without a guard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from telegrad.compile import torch_private

_ASKING: tuple[Callable[..., Any], ...] = (
    dist.get_rank,
    dist.get_world_size,
    dist.get_process_group_ranks,
    *torch_private.ASKING_GROUPS,
    dist.get_backend,
)
"""Functions that do nothing but say something of a group. Torch folds some of them, and traces
others through tables with all groups of the process."""


def everything(group: dist.ProcessGroup) -> list[object]:
    """All that is folded of a process group."""
    world = group is dist.group.WORLD
    return [group.group_name, group.name(), group.size(), group.rank(), world, _members(group)]


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()  # A group that was destroyed.


def _is_world(group: dist.ProcessGroup) -> bool:
    return group is dist.group.WORLD


def _compared_with(partner: dist.ProcessGroup) -> Any:
    """Groups are equal if they are the same. One that is compared with the world is asked whether
    it is that."""
    return _is_world if _is_world(partner) else everything


process_groups = torch_private.Reading(dist.ProcessGroup, everything, _ASKING, _compared_with)


def guard_reads() -> None:
    """Put the guards into Dynamo. To be called once."""
    torch_private.guard_reads(process_groups)
