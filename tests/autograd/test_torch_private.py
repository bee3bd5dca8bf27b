"""What telegrad relies upon in torch without torch promising it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd.graph import GradientEdge

from telegrad.autograd import torch_private
from tests.autograd.failing import Fails
from tests.autograd.harness import Workers


def test_the_highest_sequence_number_runs_first() -> None:
    torch_private.self_test()


def test_a_torch_that_ignores_sequence_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "set_sequence_number", lambda node, number: None)
    with pytest.raises(ImportError, match="highest sequence number first"):
        torch_private.self_test()


def test_the_hook_of_a_node_sees_gradients_of_the_shape_and_dtype_of_its_inputs() -> None:
    seen: list[tuple[torch.Size, torch.dtype]] = []
    x = torch.ones(3, requires_grad=True)
    spread = x + torch.ones(2, 3, dtype=torch.float64)
    spread.grad_fn.register_hook(lambda inputs, _: seen.append((inputs[0].shape, inputs[0].dtype)))
    spread.sum().backward()
    assert seen == [(torch.Size([3]), torch.float32)]


def test_hooks_of_leaves_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    doubled = x * 2
    accumulator = doubled.grad_fn.next_functions[0][0]
    assert not torch_private.tensor_hooks(x)
    assert not torch_private.hooked_leaves([accumulator])
    assert not torch_private.hooked_accumulators([accumulator])
    x.register_hook(lambda g: None)
    assert torch_private.tensor_hooks(x)
    assert torch_private.hooked_leaves([accumulator]) == [accumulator]
    assert not torch_private.hooked_accumulators([accumulator])
    x.register_post_accumulate_grad_hook(lambda leaf: None)
    assert torch_private.hooked_accumulators([accumulator]) == [accumulator]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_function_is_applied_as_by_its_own_apply_in_any_grad_mode(grad_mode: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(grad_mode):
        found = torch_private.applied(Doubled)(x)
    expected = Doubled.apply(x)
    assert type(found.grad_fn) is type(expected.grad_fn)
    assert found.grad_fn.next_functions == expected.grad_fn.next_functions
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, torch.full((2,), 2.0))


def test_the_engine_takes_edges_that_were_made_without_their_constructor() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    product = x * y * 3
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in (x, y)]
    of_x, of_y = torch_private.run_engine(
        [(product.grad_fn, 0)], [torch.ones(2)], nodes[:1], [y], False, False
    )
    assert torch.equal(of_x, torch.full((2,), 3.0))
    assert torch.equal(of_y, torch.full((2,), 3.0))


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_on_an_accumulator_are_seen_until_they_are_removed(kind: str) -> None:
    x = torch.ones(2, requires_grad=True)
    doubled = x * 2
    accumulator = doubled.grad_fn.next_functions[0][0]
    assert not torch_private.accumulator_hooks(accumulator)
    handle = getattr(accumulator, kind)(lambda *_: None)
    assert torch_private.node_hooks.ever
    assert torch_private.accumulator_hooks(accumulator)
    handle.remove()
    assert not torch_private.accumulator_hooks(accumulator)


def test_compiled_autograd_and_threads_are_as_before_after_the_eager_engine() -> None:
    assert torch._C._is_multithreading_enabled()
    with compiled_autograd._enable(lambda graph: pytest.fail("compiled")):
        with torch_private.eager_engine():
            assert not torch._C._is_multithreading_enabled()
            x = torch.ones(2, requires_grad=True)
            torch.autograd.grad((x * 2).sum(), x)
        before, dynamic = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
        assert before is not None
        torch._C._dynamo.compiled_autograd.set_autograd_compiler(before, dynamic)
    assert torch._C._is_multithreading_enabled()


def test_dropping_queued_tasks_frees_the_graph_of_a_failed_call() -> None:
    import gc
    import weakref

    class Big:
        pass

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, big):
            ctx.big = big
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g, None

    gc.collect()
    gc.disable()
    try:
        big = Big()
        alive = weakref.ref(big)
        x = torch.ones(2, requires_grad=True)
        kept = Keeps.apply(x, big)
        failing = Fails.apply(x)
        torch_private.set_sequence_number(failing.grad_fn, torch_private.FIRST)
        edges = [GradientEdge(kept.grad_fn, 0), GradientEdge(failing.grad_fn, 0)]
        with pytest.raises(ValueError, match="on purpose"), torch_private.eager_engine():
            torch.autograd.grad(edges, x, [torch.ones(2), torch.ones(2)])
        del big, kept, failing, edges
        torch_private.drop_queued_tasks()
        assert alive() is None
    finally:
        gc.enable()


def test_compiled_autograd_comes_back_when_the_last_engine_is_left() -> None:
    """It is one switch for all threads: the first to leave must not turn it on for the others."""

    def is_on() -> bool:
        switch = torch._C._dynamo.compiled_autograd.set_autograd_compiler
        found = switch(None, False)
        if found[0] is not None:
            switch(*found)
        return found[0] is not None

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        first, second = torch_private.eager_engine(), torch_private.eager_engine()
        first.__enter__()
        second.__enter__()
        first.__exit__()
        assert not is_on()
        second.__exit__()
        assert is_on()
    assert not is_on()


def test_compiled_autograd_stays_off_when_it_was_switched_off_meanwhile() -> None:
    engine = torch_private.eager_engine()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        engine.__enter__()
    engine.__exit__()
    assert torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)[0] is None


def test_a_process_group_is_seen_as_long_as_it_exists(tmp_path: Path) -> None:
    assert not torch_private.process_group_exists()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert torch_private.process_group_exists()
    finally:
        torch.distributed.destroy_process_group()
    assert not torch_private.process_group_exists()


def test_who_else_knows_the_memory_of_a_tensor_is_counted() -> None:
    """What is relied upon: that torch counts the object which is asked, and each view."""
    alone = torch.ones(3) * 2
    assert not torch_private.shares_memory(alone)
    view = alone.view(3, 1)
    assert torch_private.shares_memory(alone)
    assert torch_private.shares_memory(view)
    del view
    assert not torch_private.shares_memory(alone)
    assert torch_private.shares_memory(alone.to_sparse())


FORKED = """
import os, threading, torch
from telegrad.autograd import torch_private

def save(weight, barrier):
    barrier.wait()
    for _ in range(20):
        weight.exp()

torch.ones(2, requires_grad=True).exp().sum().backward()
failed = 0
for _ in range(60):
    child = os.fork()
    if not child:
        torch_private.make_engine()
        weight = torch.ones(2, requires_grad=True)
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=save, args=(weight, barrier)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        weight.exp().sum().backward()
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
print(failed)
"""


def test_threads_of_a_forked_process_find_an_engine_that_is_made() -> None:
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert run.stdout.split() == ["0"], run.stderr[-2000:]


def test_a_worker_has_its_engine_made_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    monkeypatch.setattr(torch_private, "make_engine", lambda: made.append(None))
    workers = Workers(2)
    assert len(made) == len(workers.nodes)
