"""Whole training steps as one graph: context, calls, backward, optimizer."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.compile import calls
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.compile import functions as f
from tests.compile.checks import BACKENDS, assert_same, compiled, differentiated

pytestmark = pytest.mark.usefixtures("job")


def train(backend: str | None, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    remote = RemoteModule("worker1", nn.Linear, (3, 3))
    remote.load_state_dict(nn.Linear(3, 3).state_dict())
    local = nn.Linear(3, 3)
    optimizer = DistributedOptimizer(torch.optim.SGD, [remote, local], lr=0.05)

    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = (remote(local(x).relu()) - x).pow(2).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.detach()

    run, counter = (step, None) if backend is None else compiled(step, backend)
    losses = [run(torch.randn(5, 3)) for _ in range(steps)]
    assert counter is None or counter.frame_count == 1
    return [torch.stack(losses), local.weight.detach(), remote.state_dict()["weight"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_compiled_steps_equal_those_of_eager_mode(backend: str) -> None:
    eager, fast = train(None, 100), train(backend, 100)
    for a, b in zip(eager, fast, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_gradients_of_several_contexts_add_up_in_compiled_steps() -> None:
    def trained(backend: str | None) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)

        def part(x: Tensor) -> Tensor:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", f.layer, (x * weight, x)).sum()
                autograd.backward(context_id, [loss])
                optimizer.accumulate(context_id)
            return loss.detach()

        run = part if backend is None else compiled(part, backend)[0]
        for n in (1, 2, 3):
            run(torch.ones(2, 3) * n)
        optimizer.step()
        return weight.detach()

    torch.testing.assert_close(trained(None), trained("aot_eager"))


def test_accumulated_gradients_are_applied_by_a_step_without_context_in_the_graph() -> None:
    def trained(backend: str | None) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)

        def step(x: Tensor) -> None:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", f.layer, (x * weight, x)).sum()
                autograd.backward(context_id, [loss])
                optimizer.accumulate(context_id)
            optimizer.step()

        run = step if backend is None else compiled(step, backend)[0]
        for n in (1, 2, 3):
            run(torch.ones(2, 3) * n)
        return weight.detach()

    torch.testing.assert_close(trained(None), trained("aot_eager"))


@pytest.mark.filterwarnings("error:.*lr_scheduler:UserWarning", "error:.*overridden:UserWarning")
def test_hooks_and_schedulers_of_the_optimizer_see_each_compiled_step_once() -> None:
    def trained(backend: str | None) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        seen = [torch.zeros(3), torch.zeros(3)]

        def before(*_: object) -> None:
            seen[0].add_(weight.detach())

        def after(*_: object) -> None:
            seen[1].add_(weight.detach())

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

        def step(x: Tensor) -> None:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", f.layer, (x * weight, x)).sum()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)

        run, counter = (step, None) if backend is None else compiled(step, backend)
        for n in range(5):
            run(torch.ones(2, 3) * n)
            schedule.step()
        assert counter is None or counter.frame_count == 1
        return torch.cat([weight.detach(), *seen])

    torch.testing.assert_close(trained(None), trained("aot_eager"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_reads_weights_before_and_after_a_step_as_they_are(backend: str) -> None:
    def trained(backend: str | None) -> Tensor:
        weight = nn.Parameter(torch.linspace(0.5, 1, 3))
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)

        def steps(x: Tensor) -> Tensor:
            seen = [(weight.detach() * 2).sum()]
            for _ in range(2):
                with autograd.context() as context_id:
                    loss = rpc.rpc_sync("worker1", f.layer, ((x * weight).sin(), x)).sum()
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                seen += [loss.detach(), (weight.detach() * 2).sum()]
            return torch.stack(seen)

        run, counter = (steps, None) if backend is None else compiled(steps, backend)
        found = [run(torch.ones(2, 3)) for _ in range(3)]
        assert counter is None or counter.frame_count == 1
        return torch.stack([*found, torch.cat([weight.detach(), weight[:2].detach()])])

    torch.testing.assert_close(trained(None), trained(backend))


def test_a_pass_that_fails_in_a_graph_raises_and_leaves_no_context_behind() -> None:
    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", f.fail, (x,)).sum()
            autograd.backward(context_id, [loss])
        return loss.detach()

    run, _ = compiled(step, "aot_eager")
    with pytest.raises(ValueError, match="the remote function failed"):
        run(torch.ones(3, requires_grad=True))
    assert len(autograd.api.autograd_of().container) == 0


def test_the_timeout_of_a_backward_in_a_graph_is_kept() -> None:
    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", f.held, (x,)).sum()
            autograd.backward(context_id, [loss], timeout=0.2)
        return loss.detach()

    run, _ = compiled(step, "aot_eager")
    try:
        with pytest.raises(rpc.CallTimeout, match=r"did not end in 0\.2 s"):
            run(torch.ones(3, requires_grad=True))
    finally:
        rpc.rpc_sync("worker1", f.release)
    gc.collect()
    assert calls.live_records() == 0
    assert len(autograd.api.autograd_of().container) == 0


def test_steps_compile_on_any_thread_and_settings_of_torch_stay_as_they_are() -> None:
    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", f.layer, (x, x)).sum()
            autograd.backward(context_id, [loss])
        return loss.detach()

    run, counter = compiled(step, "aot_eager")
    x = torch.ones(4, 3, requires_grad=True)
    with ThreadPoolExecutor(1) as thread:
        losses = [thread.submit(run, x).result(), run(x)]
    torch.testing.assert_close(*losses)
    assert counter.frame_count == 1
    assert not torch._dynamo.config.trace_autograd_ops


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_fetched_and_not_used_holds_up_no_gradient(
    backend: str, backward_inside: bool
) -> None:
    """The owner waits for the gradient of both uses; the backward code knows only of one."""

    def step(x: Tensor, context_id: int) -> Tensor:
        reference = rpc.remote("worker1", f.layer, (x * 2, x))
        loss = rpc.rpc_sync("worker1", f.scaled, (reference, x)).sum()
        reference.to_here()
        if backward_inside:
            autograd.backward(context_id, [loss], timeout=20)
            return loss.detach()
        return loss

    x = torch.randn(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad((f.layer(x * 2, x) * x).sum(), x)
    run, _ = compiled(step, backend)
    with autograd.context() as context_id:
        loss = run(x, context_id)
        if not backward_inside:
            autograd.backward(context_id, [loss], timeout=20)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_references_pass_between_compiled_functions(backend: str) -> None:
    def make(x: Tensor) -> object:
        return rpc.remote("worker1", f.layer, (x * 2, x))

    def use(reference: rpc.RRef[Tensor], y: Tensor) -> Tensor:
        product = rpc.rpc_sync("worker1", f.scaled, (reference, y))
        return (product * reference.to_here()).sum() + y.sum()

    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    expected = differentiated(lambda x, y: use(make(x), y), x, y)
    (fast_make, _), (fast_use, counter) = compiled(make, backend), compiled(use, backend)
    for _ in range(3):
        assert_same(expected, differentiated(lambda x, y: fast_use(fast_make(x), y), x, y))
    assert counter.frame_count == 1, "another reference must not cause a recompilation"


def test_a_reference_that_a_graph_made_is_read_outside_again_and_again() -> None:
    make, _ = compiled(lambda x: rpc.remote("worker1", f.layer, (x, x)), "aot_eager")
    x = torch.randn(4, 3)
    for rows in (4, 3):
        reference = make(x[:rows])
        for _ in range(3):
            torch.testing.assert_close(reference.to_here(), f.layer(x[:rows], x[:rows]).detach())


def test_a_remote_module_keeps_its_state_while_its_shapes_are_found_out() -> None:
    module = RemoteModule("worker1", f.Norm)
    run, _ = compiled(lambda x: module(x), "aot_eager")
    x = torch.randn(6, 3)
    with autograd.context():
        got = run(x)
    assert module.run(f.counter) == 1
    torch.testing.assert_close(got, nn.BatchNorm1d(3)(x))
