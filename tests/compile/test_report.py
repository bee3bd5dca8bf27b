"""The uses of the compile report, on the quickest backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks.compile_objects import Holder, examine, sections
from telegrad.compile import guard_process_groups


@pytest.fixture
def world() -> Iterator[None]:
    guard_process_groups()
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_groups_meshes_placements_and_dtensors_compile_without_a_break_or_a_stale_constant() -> (
    None
):
    failed = {}
    for section, uses, objects in sections():
        for name, use in uses.items():
            given = [Holder(o) for o in objects] if "of an argument" in name else objects
            outcome = examine(use, given, "eager")
            compilations = 0 if not outcome.startswith("works") else int(outcome.split()[1])
            if not 1 <= compilations <= len(objects):
                failed[f"{section}: {name}"] = outcome
    assert not failed
