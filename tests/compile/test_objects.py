"""Process groups and meshes in compiled functions: folded, and guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from telegrad.compile import guard_process_groups, objects
from tests.compile.checks import compiled

FOLDED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "size": lambda x, g: x + g.size(),
    "world size": lambda x, g: x + dist.get_world_size(g),
    "members": lambda x, g: x + len(dist.get_process_group_ranks(g)),
    "is WORLD": lambda x, g: x + (1 if g is dist.group.WORLD else 2),
    "== WORLD": lambda x, g: x + (1 if g == dist.group.WORLD else 2),
}


@pytest.fixture
def groups() -> Iterator[list[dist.ProcessGroup]]:
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield [world, dist.new_group([0]), dist.new_group([0, 1])]
    finally:
        dist.destroy_process_group()
        guard_process_groups()


def is_stale(function: Callable[[Tensor, Any], Tensor], groups: list[Any]) -> bool:
    fast, _ = compiled(function, "aot_eager")
    x = torch.zeros(2)
    return any(not torch.equal(fast(x, g), function(x, g)) for g in [*groups, groups[0]])


@pytest.mark.parametrize("what", FOLDED)
def test_a_process_group_as_argument_is_guarded_by_all_that_is_folded(
    what: str, groups: list[Any]
) -> None:
    objects.guard_as_torch_does()
    assert is_stale(FOLDED[what], groups), "torch has mended this: the guard can go"
    torch._dynamo.reset()
    guard_process_groups()
    assert not is_stale(FOLDED[what], groups)


TABLE: dict[Any, int] = {}

KEYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "global table": lambda x, key: x + TABLE[key],
    "get": lambda x, key: x + TABLE.get(key, 7),
    "in": lambda x, key: x + (1 if key in TABLE else 2),
    "in a set": lambda x, key: x + (1 if key in {next(iter(TABLE))} else 2),
}


@pytest.mark.parametrize("what", KEYS)
def test_a_process_group_or_a_mesh_as_key_is_guarded(what: str, groups: list[Any]) -> None:
    layouts = (((2, 2), ("a", "b")), ((4,), ("a",)), ((2, 2), ("a", "c")))
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=names) for shape, names in layouts]
    for keys in (groups[1:] + groups[:1], meshes):
        torch._dynamo.reset()
        TABLE.clear()
        TABLE.update({key: place for place, key in enumerate(keys)})
        if what != "global table":
            del TABLE[keys[2]]
        fast, counter = compiled(KEYS[what], "aot_eager")
        for key in [*keys, *keys]:
            x = torch.zeros(2)
            torch.testing.assert_close(fast(x, key), KEYS[what](x, key))
        assert counter.frame_count <= len(keys)


def mesh_as(rank: int) -> DeviceMesh:
    dist.init_process_group("fake", rank=rank, world_size=4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, m: x + 10 * m.get_coordinate()[0] + m.get_coordinate()[1],
        lambda x, m: x + m.get_local_rank("model"),
        lambda x, m: x + m.get_rank(),
    ],
    ids=["coordinate", "local rank", "rank"],
)
def test_a_mesh_that_is_formed_anew_is_guarded_by_the_place_in_it(
    use: Callable[[Tensor, Any], Tensor],
) -> None:
    torch._dynamo.reset()
    guard_process_groups()
    fast, counter = compiled(use, "aot_eager")
    x = torch.zeros(2)
    for rank in (0, 3, 0):
        try:
            mesh = mesh_as(rank)
            torch.testing.assert_close(fast(x, mesh), use(x, mesh))
        finally:
            dist.destroy_process_group()
    assert counter.frame_count == 2
