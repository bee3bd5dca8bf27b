"""Process groups, device meshes, placements and DTensor in compiled functions, by backend.

    python -m benchmarks.compile_objects telegrad aot_eager inductor
    python -m benchmarks.compile_objects stock aot_eager

Part of `make compile-report`. Each use runs in eager mode and as one graph, for several objects in
turn and the first again: a stale constant shows as a wrong result. In `stock` nothing of telegrad
is imported. The process group is torch's fake one, of four.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Use = Callable[[Tensor, Any], Any]


@dataclass
class Holder:
    """Has a process group or a mesh as an attribute."""

    kept: Any


current = Holder(None)
NOBODY = dist.GroupMember.NON_GROUP_MEMBER


def _in_global(x: Tensor, group: Any) -> Tensor:
    return x + current.kept.size() + current.kept.rank()


GROUPS: dict[str, Use] = {
    "rank, size": lambda x, g: x + 10 * g.rank() + g.size(),
    "name": lambda x, g: x + len(g.group_name) + ord(g.group_name[-1]),
    "name()": lambda x, g: x + len(g.name()),
    "members": lambda x, g: x + sum(dist.get_process_group_ranks(g)),
    "get_rank, get_world_size": lambda x, g: x + 10 * dist.get_rank(g) + dist.get_world_size(g),
    "WORLD (is)": lambda x, g: x + (1 if g is dist.group.WORLD else 2),
    "WORLD (==)": lambda x, g: x + (1 if g == dist.group.WORLD else 2),
    "WORLD's size": lambda x, g: x + dist.group.WORLD.size(),
    "NON_GROUP_MEMBER": lambda x, g: x + (1 if g is NOBODY else 2),
    "get_backend": lambda x, g: x + len(dist.get_backend(g)),
    "rank not in group": lambda x, g: x + (1 if c10d._rank_not_in_group(g) else 2),
    "group tag": lambda x, g: x + len(c10d._get_group_tag(g)),
    "size by name": lambda x, g: x + c10d._get_group_size_by_name(g.group_name),
    "is_initialized, get_rank()": lambda x, g: x + dist.is_initialized() + dist.get_rank(),
    "as return value": lambda x, g: (x + 1, g),
    "as attribute": lambda x, g: x + Holder(g).kept.size(),
    "as attribute of an argument": lambda x, h: x + h.kept.size() + h.kept.rank(),
    "as global": _in_global,
}

MESHES: dict[str, Use] = {
    "size": lambda x, m: x + m.size() + m.size(0),
    "ndim": lambda x, m: x + m.ndim,
    "shape": lambda x, m: x + m.shape[0] + 10 * len(m.shape),
    "device type": lambda x, m: x + len(m.device_type),
    "dimension names": lambda x, m: x + sum(map(len, m.mesh_dim_names)),
    "coordinate": lambda x, m: x + sum(m.get_coordinate()),
    "rank": lambda x, m: x + m.get_rank(),
    "local rank": lambda x, m: x + m.get_local_rank(0),
    "group": lambda x, m: x + m.get_group(0).size() + m.get_group(0).rank(),
    "all groups": lambda x, m: x + len(m.get_all_groups()),
    "slicing": lambda x, m: x + m["data"].size() + m["data"].ndim,
    "==": lambda x, m: x + (1 if m == current.kept else 2),
    "hash": lambda x, m: x + hash(m) % 7,
    "as return value": lambda x, m: (x + 1, m),
    "as attribute of an argument": lambda x, h: x + h.kept.size(0),
    "as global": lambda x, m: x + current.kept.size(0) + current.kept.get_local_rank(0),
}

PLACEMENTS: dict[str, Use] = {
    "construction": lambda x, p: x + Shard(1).dim + len(Partial("sum").reduce_op),
    "predicates": lambda x, p: x + p.is_shard() + 2 * p.is_replicate() + 4 * p.is_partial(),
    "is_shard(dim)": lambda x, p: x + p.is_shard(1),
    "equality": lambda x, p: x + (p == Shard(0)) + 2 * (p == Replicate()),
    "isinstance": lambda x, p: x + isinstance(p, Shard) + 2 * isinstance(p, Partial),
    "as key": lambda x, p: x + {Shard(0): 1, Shard(1): 2, Replicate(): 3, Partial(): 4}[p],
    "as return value": lambda x, p: (x + 1, p),
}


def _round_trip(x: Tensor, mesh: Any) -> Tensor:
    placed = DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    return (placed * 2).to_local()


def _redistributed(x: Tensor, mesh: Any) -> Tensor:
    placed = DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    return placed.redistribute(mesh, [Replicate()] * mesh.ndim).to_local().sin()


def _reduced(x: Tensor, mesh: Any) -> Tensor:
    placed = DTensor.from_local(x, mesh, [Partial()] * mesh.ndim, run_check=False)
    return placed.redistribute(mesh, [Replicate()] * mesh.ndim).to_local() * 3


def _product(x: Tensor, mesh: Any) -> Tensor:
    rows = DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    weight = DTensor.from_local(x[:3], mesh, [Replicate()] * mesh.ndim, run_check=False)
    return (rows @ weight).tanh().to_local()


DTENSORS: dict[str, Use] = {
    "from_local, to_local, gradient": _round_trip,
    "redistribute, gradient": _redistributed,
    "from partial, gradient": _reduced,
    "product, gradient": _product,
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return bool(torch.allclose(a, b))
    if isinstance(a, tuple):
        return all(same(p, q) for p, q in zip(a, b, strict=True))
    return bool(a == b)


def with_gradient(use: Use, x: Tensor, given: Any) -> Any:
    """The result, and the gradient if the use is one that has it."""
    if use not in DTENSORS.values():
        return use(x, given)
    leaf = x.clone().requires_grad_()
    result = use(leaf, given)
    return result.detach(), torch.autograd.grad(result.sum(), leaf)[0]


def examine(use: Use, objects: list[Any], backend: str) -> str:
    """What becomes of a use with these objects in turn, and the first again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(use, backend=counter, fullgraph=True)
    x = torch.arange(12.0).reshape(4, 3)
    try:
        for given in (*objects, objects[0]):
            current.kept = given
            expected = with_gradient(use, x, given)
            if use in DTENSORS.values():
                leaf = x.clone().requires_grad_()
                result = fast(leaf, given)
                got = (result.detach(), torch.autograd.grad(result.sum(), leaf)[0])
            else:
                got = fast(x, given)
            if not same(expected, got):
                return "STALE"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:36]}"
    return f"works, {counter.frame_count} compiled"


def sections() -> list[tuple[str, dict[str, Use], list[Any]]]:
    world = dist.group.WORLD
    groups = [world, dist.new_group([0]), dist.new_group([0, 1])]
    meshes: list[DeviceMesh] = [
        init_device_mesh("cpu", (4,), mesh_dim_names=("data",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model")),
    ]
    placements = [Shard(0), Shard(1), Replicate(), Partial()]
    return [
        ("process group", GROUPS, groups),
        ("device mesh", MESHES, meshes),
        ("placement", PLACEMENTS, placements),
        ("DTensor", DTENSORS, meshes),
    ]


def try_fake_job(backend: str) -> str:
    """A step for 512 workers, compiled and run in one process."""
    import telegrad
    from telegrad import autograd
    from telegrad.nn import RemoteModule

    counter = CompileCounterWithBackend(backend)

    def train() -> list[Tensor]:
        last = RemoteModule("worker511", torch.nn.Linear, (3, 3))

        def step(x: Tensor) -> Tensor:
            with autograd.context() as context_id:
                loss = last(x * dist.get_world_size()).sum()
                autograd.backward(context_id, [loss])
            return loss.detach()

        fast = torch.compile(step, backend=counter, fullgraph=True)
        return [step(torch.ones(2, 3)), fast(torch.ones(2, 3)), fast(torch.ones(2, 3))]

    with telegrad.testing.fake_job(512) as job:
        losses = job.run(train)
    if not all(torch.allclose(loss, losses[0]) for loss in losses):
        return "differs"
    return f"works, {counter.frame_count} compiled"


def main(who: str, backends: list[str]) -> None:
    if who == "telegrad":
        import telegrad.compile  # noqa: F401 - installs the guards
    dist.init_process_group("fake", rank=0, world_size=4)
    for section, uses, objects in sections():
        for name, use in uses.items():
            given = [Holder(o) for o in objects] if "of an argument" in name else objects
            row = [examine(use, given, backend) for backend in backends]
            print(json.dumps([f"{section}: {name}", row]), flush=True)
    dist.destroy_process_group()
    if who == "telegrad":
        row = [try_fake_job(backend) for backend in backends]
        print(json.dumps(["fake_job(512): a step with backward", row]), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main(sys.argv[1], sys.argv[2:])
