"""A training step over workers whose right answer one process can tell, and what it leaves behind.

All parameters are made anew from the seed and the number of the step, so that a step which failed
says nothing about the next: each ends right or with a named error, whatever happened before.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from telegrad import autograd, rpc
from telegrad.rpc.current import current_node

SMALL, LARGE = 8, 192
LARGE_EVERY = 10
OWN_CALLS = ("closing on", "tests.chaos.program.leftovers on")


@dataclass(frozen=True)
class Inputs:
    """What a step computes with: one weight per stage, one per branch, and data."""

    stages: list[torch.Tensor]
    branches: list[torch.Tensor]
    data: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [*self.stages, *self.branches, self.data]


def inputs(seed: int, step: int, workers: int) -> Inputs:
    """Now and then large enough to travel through shared memory."""
    size = LARGE if step % LARGE_EVERY == 0 else SMALL
    source = torch.Generator().manual_seed(seed * 1_000_003 + step)

    def make(rows: int) -> torch.Tensor:
        return torch.randn(rows, size, generator=source, dtype=torch.float64).requires_grad_()

    return Inputs(
        [make(size) for _ in range(workers)], [make(size) for _ in range(workers)], make(4)
    )


def stage(rest: list[str], weights: list[torch.Tensor], x: torch.Tensor, timeout: float) -> Any:
    """One stage here, the others on the workers behind it: calls nest as deep as there are."""
    y = torch.tanh(x @ weights[0] / x.shape[1])
    if not rest:
        return y
    return rpc.rpc_sync(rest[0], stage, args=(rest[1:], weights[1:], y, timeout), timeout=timeout)


def branch(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ weight / x.shape[1]).sum()


def distributed(
    given: Inputs, names: list[str], timeout: float
) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients over the workers."""
    with autograd.context() as context:
        branches = [
            rpc.rpc_async(name, branch, args=(weight, given.data), timeout=timeout)
            for name, weight in zip(names, given.branches, strict=True)
        ]
        first, *rest = names
        args = (rest, given.stages, given.data, timeout)
        out = rpc.rpc_sync(first, stage, args=args, timeout=timeout)
        loss = out.square().sum() + sum(each.wait() for each in branches)
        autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
        return float(loss.detach()), [gradients[leaf] for leaf in given.leaves()]


def in_one_process(given: Inputs) -> tuple[float, list[torch.Tensor]]:
    """The oracle."""
    out = given.data
    for weight in given.stages:
        out = torch.tanh(out @ weight / out.shape[1])
    loss = out.square().sum() + sum(branch(weight, given.data) for weight in given.branches)
    return float(loss.detach()), list(torch.autograd.grad(loss, given.leaves()))


def agree(one: tuple[float, list[torch.Tensor]], other: tuple[float, list[torch.Tensor]]) -> bool:
    return abs(one[0] - other[0]) < 1e-9 and all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one[1], other[1], strict=True)
    )


def read(reference: Any, timeout: float) -> float:
    return float(reference.to_here(timeout).sum())


def pass_reference_around(names: list[str], step: int, timeout: float) -> bool:
    """A value on one worker is read by another through a third's hands."""
    owner, reader = names[step % len(names)], names[(step + 1) % len(names)]
    made = rpc.remote(owner, torch.full, args=((64,), float(step)), timeout=timeout)
    told = rpc.rpc_sync(reader, read, args=(made, timeout), timeout=timeout)
    return bool(told == 64.0 * step)


def leftovers() -> dict[str, int]:
    """What this worker still holds though nothing is under way. All of it should be zero."""
    gc.collect()
    until = time.monotonic() + 10
    while True:
        info = rpc.debug_info()
        left = {f"references: {name}": count for name, count in info["references"].items()}
        left["contexts"] = current_node().services["autograd"].counts()["num_autograd_contexts"]
        # A worker waits in `shutdown` until the job ends, and this very call is one of main's.
        calls = [call for call in info["calls in flight"] if not call.startswith(OWN_CALLS)]
        left["calls in flight"] = len(calls)
        left = {name: count for name, count in left.items() if count}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


def usage() -> dict[str, int]:
    """Threads, descriptors, shared memory and resident kilobytes of this process."""
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
    return {
        "threads": threading.active_count(),
        "descriptors": len(links),
        "segments": sum("memfd:telegrad-arena" in link for link in links),
        "resident KB": resident,
    }


def _descriptors() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        found.append(descriptor)
    return found
