"""What this room uses of torch without torch promising it.

Relied upon: meshes are equal, and have the same hash, only if a number in them is the same, which
torch itself uses to tell the meshes of several threads apart; guards ask for it, too.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

_make = DeviceMesh.__init__
_world: int | None = None


def begin_world(number: int) -> None:
    """Have meshes that are made from now on, and parts of them, differ from all that were made
    before this process became a part of the world of that number.

    DTensor remembers on each thread what it has found out about operations, by the mesh. A mesh
    that is equal to one of a world that is gone would be given its process groups, gone as well.
    """
    global _world
    _world = number
    DeviceMesh.__init__ = _make_in_world  # type: ignore[method-assign, assignment]


def _make_in_world(mesh: Any, *args: Any, **kwargs: Any) -> None:
    _make(mesh, *args, **kwargs)
    if mesh._thread_id is None:
        mesh._thread_id = _world
        mesh._hash = None
