"""Gradients of leaves: added up beside `.grad`, seen once by every kind of hook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.autograd.harness import Workers


def through_worker_1(workers: Workers, x: Tensor) -> Tensor:
    """A loss on worker 0 that took a detour over worker 1."""
    (there,) = workers.cross(0, 1, [x])
    (back,) = workers.cross(1, 0, [there * 3])
    return back.sum()


def test_a_gradient_does_not_touch_grad() -> None:
    workers = Workers(2)
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.full((3,), 7.0)
    workers.backward(0, [through_worker_1(workers, w * 2)])
    assert torch.equal(w.grad, torch.full((3,), 7.0))
    found = workers.gradient(0, w)
    assert found is not None
    assert torch.equal(found, torch.full((3,), 6.0))


def test_two_leaves_do_not_share_one_gradient_tensor() -> None:
    workers = Workers(1)
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    workers.backward(0, [((a + b) * 2).sum()])
    of_a, of_b = workers.gradient(0, a), workers.gradient(0, b)
    assert of_a is not None
    assert of_b is not None
    assert of_a.data_ptr() != of_b.data_ptr()


def test_a_gradient_that_nobody_else_holds_is_not_copied() -> None:
    pointers = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 1

        @staticmethod
        def backward(ctx, g):
            made = g.clone()
            pointers.append(made.data_ptr())
            return made

    workers = Workers(1)
    a = torch.ones(3, requires_grad=True)
    workers.backward(0, [Told.apply(a).sum()])
    found = workers.gradient(0, a)
    assert found is not None
    assert found.data_ptr() == pointers[0]


def test_an_expanded_gradient_is_made_dense() -> None:
    workers = Workers(1)
    a = torch.ones(3, 4, requires_grad=True)
    workers.backward(0, [a.sum()])
    found = workers.gradient(0, a)
    assert found is not None
    assert found.is_contiguous()


@pytest.mark.parametrize("detours", [0, 1, 2])
def test_post_accumulate_hooks_run_once_and_see_the_whole_gradient(detours: int) -> None:
    workers = Workers(2)
    w = torch.ones(3, requires_grad=True)
    seen: list[Tensor | None] = []
    w.register_post_accumulate_grad_hook(
        lambda leaf: seen.append(None if leaf.grad is None else leaf.grad.clone())
    )
    loss = (w * 5).sum()
    for _ in range(detours):
        loss = loss + through_worker_1(workers, w * 2)
    workers.backward(0, [loss])
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full((3,), 5.0 + 6.0 * detours))
    assert torch.equal(workers.gradient(0, w), seen[0])
    assert w.grad is None


def test_tensor_hooks_and_post_accumulate_hooks_of_one_leaf_each_run_once() -> None:
    workers = Workers(2)
    w = torch.ones(3, requires_grad=True)
    calls: list[str] = []
    w.register_hook(lambda g: calls.append("before") or g * 10)
    w.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    workers.backward(0, [(w * 5).sum() + through_worker_1(workers, w * 2)])
    assert calls == ["before", "after"]
    assert torch.equal(workers.gradient(0, w), torch.full((3,), 110.0))


def test_hooks_on_the_accumulator_node_run_once() -> None:
    workers = Workers(2)
    w = torch.ones(3, requires_grad=True)
    calls: list[str] = []
    doubled = w * 2
    node = doubled.grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: calls.append("before"))
    node.register_hook(lambda *_: calls.append("after"))
    workers.backward(0, [through_worker_1(workers, doubled) + w.sum()])
    assert calls == ["before", "after"]
    assert torch.equal(workers.gradient(0, w), torch.full((3,), 7.0))


def test_post_accumulate_hooks_of_an_unreached_leaf_do_not_run() -> None:
    workers = Workers(2)
    w, unreached = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    unreached.register_post_accumulate_grad_hook(lambda _: pytest.fail("ran"))
    workers.cross(0, 1, [unreached * 2])
    workers.backward(0, [through_worker_1(workers, w)])
    assert workers.gradient(0, unreached) is None


def test_sparse_and_dense_gradients_of_one_leaf_add_up() -> None:
    workers = Workers(2)
    table = torch.ones(4, 3, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    workers.backward(0, [through_worker_1(workers, rows) + (table * 2).sum()])
    expected = torch.full((4, 3), 2.0)
    expected[1] += 6
    assert torch.equal(workers.gradient(0, table).to_dense(), expected)


def test_a_sparse_gradient_stays_sparse() -> None:
    workers = Workers(2)
    table = torch.ones(4, 3, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    workers.backward(0, [through_worker_1(workers, rows)])
    assert workers.gradient(0, table).is_sparse


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_ddp_reduces_inside_a_context_and_the_context_gets_the_result() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    reductions = []

    def doubling_all_reduce(_, bucket):
        reductions.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    module.register_comm_hook(None, doubling_all_reduce)
    for _ in range(3):
        workers = Workers(2)
        x = torch.randn(2, 3)
        workers.backward(0, [through_worker_1(workers, module(x))])
        (expected,) = torch.autograd.grad((module.module(x) * 3).sum(), [module.module.weight])
        assert torch.allclose(workers.gradient(0, module.module.weight), expected * 2)
        assert module.module.weight.grad is None
    assert len(reductions) == 3


def test_no_python_object_is_left_in_the_state_of_a_thread_that_a_collective_copies() -> None:
    """Gloo's thread would need the interpreter lock to let go of it: see `accumulate`."""
    seen: list[bool] = []

    def look(_: Tensor) -> None:
        seen.append(torch._C._is_key_in_tls("context"))

    workers = Workers(2)
    w = torch.ones(3, requires_grad=True)
    doubled = w * 2
    doubled.register_hook(look)
    w.register_post_accumulate_grad_hook(look)
    workers.backward(0, [through_worker_1(workers, doubled)])
    seen.append(torch._C._is_key_in_tls("context"))
    assert seen == [False, False, False]
