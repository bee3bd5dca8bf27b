"""Process groups and device meshes inside of compiled functions, and our own objects.

Torch folds `group.size()`, `group.rank()` and the like into constants, but guards a group that is
passed as an argument by its type alone; see reads.py. It guards a mesh by its layout, but folds the
place of this process in it, too, which is another one when the same workers form their mesh anew in
another order. The record that torch keeps of that type has a place for a guard; here it is filled.

Two methods make torch fail although nothing stands against them: `group.name()` is folded here, and
`mesh.get_all_groups()` is traced.

Our own handles are compared by `==` over numbers that Dynamo guards by itself. Where a program asks
by `is`, uses one as a key, or has one under two names, Dynamo remembers the outcome and not what it
was about; so that is guarded here as well. A group or a mesh has two names where it is an argument
and a key of a table, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from telegrad.compile import reads, torch_private
from telegrad.compile.handles import collect_all, wait_all
from telegrad.compile.sites import Era
from telegrad.nn.remote_module import RemoteModule
from telegrad.rpc.futures import CallFuture
from telegrad.rpc.rref import RRef
from telegrad.rpc.worker import WorkerInfo

process_groups = torch_private.Opaque(dist.ProcessGroup)
device_meshes = torch_private.Opaque(DeviceMesh)


def place_in_mesh(mesh: DeviceMesh) -> list[object]:
    """What is folded of a device mesh besides its layout."""
    if not dist.is_initialized():
        return []
    return [dist.get_rank(), dist.get_world_size(), mesh.get_coordinate()]


def guard_process_groups() -> None:
    """Have compiled functions notice when they are given another process group or mesh."""
    reads.process_groups.enabled = True
    device_meshes.guard(place_in_mesh)


def guard_as_torch_does() -> None:
    """For tests that show what is missing."""
    reads.process_groups.enabled = False


reads.guard_reads()
process_groups.fold("name")
device_meshes.trace("get_all_groups")
_HANDLES = (RRef, WorkerInfo, CallFuture, RemoteModule)
torch_private.guard_identity((*_HANDLES, Era))
torch_private.guard_aliases((*_HANDLES, dist.ProcessGroup, DeviceMesh))
torch_private.look_into_frozen_objects()
torch_private.guard_signs_of_zero()
torch_private.trace_instead(
    {torch.futures.wait_all: wait_all, torch.futures.collect_all: collect_all}
)
torch_private.guard_keys(
    {
        WorkerInfo: ("name", "id"),
        RRef: ("_reference.owner", "_reference.created_on", "_reference.number"),
        RemoteModule: ("_number",),
    }
)
