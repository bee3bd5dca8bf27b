"""Process groups and our own handles in compiled functions: folded, and guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from telegrad import rpc
from telegrad.compile import guard_process_groups, torch_private
from telegrad.rpc import WorkerInfo
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
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
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
    torch_private.guard_opaque_type(dist.ProcessGroup, None)
    assert is_stale(FOLDED[what], groups), "torch has mended this: the guard can go"
    torch._dynamo.reset()
    guard_process_groups()
    assert not is_stale(FOLDED[what], groups)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x + (1 if w == rpc.get_worker_info("worker1") else 2),
        lambda x, w: x + w.id,
        lambda x, w: x + len(w.name),
        lambda x, w: x + {WorkerInfo("worker1", 1): 5, WorkerInfo("worker2", 2): 6}[w],
    ],
    ids=["equality", "id", "name", "as key"],
)
def test_a_worker_info_folds_and_is_guarded(use: Callable[[Tensor, Any], Tensor]) -> None:
    first, second = WorkerInfo("worker1", 1), WorkerInfo("worker2", 2)
    fast, _ = compiled(use, "aot_eager")
    x = torch.zeros(2)
    for worker in (first, second, WorkerInfo("worker1", 1)):
        torch.testing.assert_close(fast(x, worker), use(x, worker))


def _three() -> rpc.RRef[int]:
    return rpc.RRef(3)


@pytest.mark.usefixtures("job")
def test_the_owner_of_a_reference_folds_and_is_guarded() -> None:
    references = [rpc.rpc_sync(worker, _three) for worker in ("worker1", "worker2")]

    def use(x: Tensor, r: rpc.RRef[int]) -> Tensor:
        return x + r.owner().id + (10 if r.is_owner() else 0)

    fast, _ = compiled(use, "aot_eager")
    for reference in (*references, references[0]):
        torch.testing.assert_close(fast(torch.zeros(1), reference), use(torch.zeros(1), reference))
