"""Graphs so deep that freeing them by recursion would end the process."""

from __future__ import annotations

import gc
import subprocess
import weakref
from typing import Any

import pytest
import torch

from telegrad.autograd.freeing import free_without_recursion
from tests.scripts import run_script

DEEP = 70_000

SCRIPT = f"""
import torch
from telegrad.autograd.freeing import free_without_recursion

x = y = torch.ones(1, requires_grad=True)
for number in range({DEEP}):
    y = y * 1.0 if number % 3 else y + y.detach()
loss = y.sum() if {{outlives}} else y
nodes, stack = {{}}, [((loss.grad_fn, 0),)]
while stack:
    for node, _ in stack.pop():
        if node is not None and node not in nodes:
            nodes[node] = None
            stack.append(node.next_functions)
keep = {{keep}}
if keep:
    free_without_recursion(nodes)
del node, nodes
torch.autograd.backward(loss)
del loss
del y
print(x.grad.item())
"""


def run(keep: bool, outlives: bool = False) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("{keep}", str(keep)).replace("{outlives}", str(outlives))
    return run_script("-c", script)


@pytest.mark.parametrize("outlives", [False, True], ids=["loss goes last", "y goes last"])
def test_a_deep_graph_is_freed(outlives: bool) -> None:
    done = run(True, outlives)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1.0\n"


@pytest.mark.slow
def test_torch_alone_does_not_free_a_deep_graph_that_python_has_seen() -> None:
    """If this fails, torch has learnt it, and `freeing` can go."""
    assert run(keep=False).returncode != 0


def nodes_of(root: torch.Tensor) -> dict[Any, None]:
    nodes: dict[Any, None] = {}
    stack: list[Any] = [((root.grad_fn, 0),)]
    while stack:
        for node, _ in stack.pop():
            if node is not None and node not in nodes:
                nodes[node] = None
                stack.append(node.next_functions)
    return nodes


class Mark:
    """Goes with the node that has it."""


@pytest.mark.parametrize("passes", [1, 2])
def test_what_the_graph_holds_goes_with_its_tops(passes: int) -> None:
    x = torch.ones(3, requires_grad=True)
    middle = (x * 2).exp()
    first, second = (middle * middle).sum(), middle.tanh().sum()
    gc.disable()
    try:
        for _ in range(passes):
            free_without_recursion({**nodes_of(first), **nodes_of(second)})
        mark = Mark()
        middle.grad_fn.metadata["mark"] = mark
        node = weakref.ref(mark)
        del middle, mark
        torch.autograd.backward([first, second])
        del first
        assert node() is not None
        del second
        assert node() is None
    finally:
        gc.enable()
