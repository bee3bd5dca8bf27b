"""A context is shown so that a person can read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import backward, context, describe
from telegrad.testing import Faults, simulate, sleep

WORKERS = ("worker0", "worker1", "worker2")


def figure_of(main: Any, **options: Any) -> str:
    text: str = simulate(main, WORKERS, **options).value
    return text


def my_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def two_workers() -> str:
    """The example of the design note of torch's distributed autograd."""
    with context() as context_id:
        t1 = torch.rand((3, 3), requires_grad=True)
        t2 = torch.rand((3, 3), requires_grad=True)
        t3 = rpc.rpc_sync("worker1", my_add, args=(t1, t2))
        t4 = torch.rand((3, 3), requires_grad=True)
        loss = (t3 * t4).sum()
        backward(context_id, [loss], retain_graph=True)
        return describe(context_id, [loss])


def test_the_figure_of_two_workers() -> None:
    title, *lines = figure_of(two_workers).splitlines()
    assert title == "context 1, made on worker0"
    assert lines == [
        "",
        "worker0:",
        "  send1   to worker1      = leaf(3, 3), leaf(3, 3)",
        "  recv2   from worker1",
        "  root                    = sum(mul(recv2, leaf(3, 3)))",
        "  3 gradients",
        "",
        "worker1:",
        "  recv1   from worker0",
        "  send2   to worker0      = add(recv1[0], recv1[1])",
        "  0 gradients",
        "",
        "In backward the gradient of recvN becomes that of sendN, and flows on to what sendN is.",
    ]


def doubled_via(x: Tensor, route: list[str]) -> Tensor:
    if not route:
        return x * 2
    result: Tensor = rpc.rpc_sync(route[0], doubled_via, args=(x + 1, route[1:]))
    return result.sin()


def test_workers_behind_others_are_asked_too_and_numbers_grow_along_the_calls() -> None:
    def chain() -> str:
        with context() as context_id:
            doubled_via(torch.ones(2, requires_grad=True), ["worker1", "worker2"])
            return describe(context_id)

    text = figure_of(chain)
    assert "send1   to worker1      = add(leaf(2))" in text
    assert "send2   to worker2      = add(recv1)" in text
    assert "send3   to worker1      = mul(recv2)" in text
    assert "send4   to worker0      = sin(recv3)" in text


def test_to_look_at_a_context_does_not_change_it() -> None:
    def twice() -> list[str]:
        with context() as context_id:
            doubled_via(torch.ones(2, requires_grad=True), ["worker1", "worker2"])
            return [describe(context_id), describe(context_id)]

    first, second = figure_of(twice)
    assert first == second


def test_a_large_local_graph_is_summed_up() -> None:
    def many() -> str:
        x = torch.ones(2, requires_grad=True)
        with context() as context_id:
            y = x
            for _ in range(30):
                y = y * x
            rpc.rpc_sync("worker1", doubled_via, args=(y, []))
            return describe(context_id)

    assert "send1   to worker1      = 30 operations on leaf(2)" in figure_of(many)


def test_a_worker_that_is_gone_is_named() -> None:
    def main() -> str:
        with context() as context_id:
            rpc.rpc_sync("worker1", doubled_via, args=(torch.ones(2, requires_grad=True), []))
            sleep(5)
            return describe(context_id)

    text = figure_of(main, faults=Faults().kill("worker1", after=2.0))
    assert "worker1:\n  could not be asked: Worker 'worker1' is gone" in text
