"""Process groups inside of compiled functions.

Torch folds `group.size()`, `group.rank()` and the like into constants, but guards a group that is
passed as an argument by its type alone: with another group, the constants of the first one are used
in silence. The record that torch keeps of the type has a place for a guard, which is empty; here it
is filled with all that is folded. Groups with equal name, size, rank and members share their graph.
"""

from __future__ import annotations

import torch.distributed as dist

from telegrad.compile import torch_private


def group_identity(group: dist.ProcessGroup) -> list[object]:
    """All that torch folds of a process group."""
    return [
        group.group_name,
        group.size(),
        group.rank(),
        tuple(dist.get_process_group_ranks(group)),
        group is dist.group.WORLD,
    ]


def guard_process_groups() -> None:
    """Have compiled functions notice when they are given another process group."""
    torch_private.guard_opaque_type(dist.ProcessGroup, group_identity)
