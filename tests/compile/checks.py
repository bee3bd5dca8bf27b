"""Compiled beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from telegrad import autograd, rpc
from tests.compile.functions import gradient_of_weight

WORKERS = ("worker1", "worker2")
BACKENDS = [
    pytest.param("eager", marks=pytest.mark.slow),
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.slow),
]


def compiled(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], Any]:
    """The function, compiled as one graph, and what counts its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def differentiated(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor | None]:
    """Loss and all gradients, on every worker."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with autograd.context() as context_id:
        loss = function(*leaves)
        autograd.backward(context_id, [loss], timeout=20)
        found = autograd.get_gradients(context_id)
        here = [found.get(leaf) for leaf in leaves]
        there = [rpc.rpc_sync(worker, gradient_of_weight, (context_id,)) for worker in WORKERS]
    return [loss.detach(), *here, *there]


def assert_same(expected: list[Tensor | None], got: list[Tensor | None]) -> None:
    for a, b in zip(expected, got, strict=True):
        if a is None:
            # A compiled function gives zeros where nothing was reached.
            assert b is None or not b.any()
        else:
            torch.testing.assert_close(a, b)
