"""What torch programs do inside a pass that has to wait, and often to suspend.

Each program is `y = f(a)`, sent to worker 1 and back, and used again beside what came back: the
graph around `f` runs in stages whatever happens.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from telegrad.autograd.context import current_context
from telegrad.autograd.errors import AutogradError, PassFailed
from tests.autograd.harness import Workers
from tests.autograd.machine import OneProcess

Cross = Callable[[int, int, Sequence[Tensor]], list[Tensor]]


def residual(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, cross: Cross) -> Tensor:
    a = f(x)
    b = a.sin()
    (there,) = cross(0, 1, [b])
    (back,) = cross(1, 0, [there * v])
    return (a * b * back).sum().abs() + (f(a) * back).sum().abs()


def check(
    f: Callable[[Tensor], Tensor],
    leaves: Sequence[Tensor] = (),
    x: Tensor | None = None,
    seeds: Sequence[int] = range(4),
) -> None:
    """The gradients of the program on two workers are those of one process."""
    x = torch.tensor([0.5, -0.3, 0.8], requires_grad=True) if x is None else x
    v = torch.tensor([0.3, 0.2, 0.1], requires_grad=True)
    inputs = [x, *leaves, v]
    loss = residual(f, x, v, OneProcess().cross)
    expected = torch.autograd.grad(loss, inputs, allow_unused=True)
    for seed in seeds:
        workers = Workers(2, seed, engine_waits=(0, 1)[seed % 2])
        workers.backward(0, [residual(f, x, v, workers.cross)])
        found = [workers.gradient(0, leaf) for leaf in inputs[:-1]] + [workers.gradient(1, v)]
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b.to_dense(), a.to_dense())


def linear() -> tuple[nn.Linear, list[Tensor]]:
    module = nn.Linear(3, 3)
    return module, list(module.parameters())


def test_plain() -> None:
    check(lambda x: x * 2)


def test_checkpoint() -> None:
    module, leaves = linear()
    check(lambda x: checkpoint(lambda t: module(t).tanh(), x, use_reentrant=False), leaves)


def test_reentrant_checkpoint_says_what_to_use_instead() -> None:
    workers = Workers(2)
    x = torch.ones(3, requires_grad=True)
    (there,) = workers.cross(0, 1, [checkpoint(torch.sin, x, use_reentrant=True)])
    (back,) = workers.cross(1, 0, [there * 2])
    with pytest.raises(AutogradError, match="use_reentrant=False"):
        workers.backward(0, [back.sum()])


def test_a_module_compiled_for_autograd() -> None:
    module, leaves = linear()
    check(torch.compile(lambda t: module(t).tanh() * t, backend="aot_eager"), leaves)


def test_compiled_autograd_does_not_trace_into_a_pass() -> None:
    with compiled_autograd._enable(lambda graph: pytest.fail("compiled")):
        workers = Workers(2)
        x = torch.ones(3, requires_grad=True)
        v = torch.ones(3)
        workers.backward(0, [residual(torch.sin, x, v, workers.cross)])
    assert workers.gradient(0, x) is not None


def test_autocast() -> None:
    module, leaves = linear()

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x).float() * x

    check(f, leaves)


def test_complex() -> None:
    check(lambda x: (x * (1 + 2j)).abs())


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GRUCell(3, 3), nn.MultiheadAttention(3, 1)],
    ids=lambda module: type(module).__name__,
)
def test_modules(module: nn.Module) -> None:
    def f(x: Tensor) -> Tensor:
        batch = torch.stack([x, x * 2, x.sin()])
        out = module(batch, batch, batch) if isinstance(module, nn.MultiheadAttention) else None
        return (module(batch) if out is None else out[0])[0]

    check(f, list(module.parameters()))


def test_saved_tensor_hooks() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        check(lambda x: x.exp() * x)


def test_an_engine_call_inside_a_backward_formula() -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                copy = x.detach().requires_grad_()
                return torch.autograd.grad(copy * copy, copy, g)[0]

    check(lambda x: Inner.apply(x * 2))


def test_anomaly_mode_does_not_report_suspensions() -> None:
    with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
        warnings.filterwarnings("ignore", "Error detected in (Send|Gate)Backward")
        check(lambda x: x * 2)
    assert not [w for w in caught if "Error detected" in str(w.message)]


def test_a_deep_graph() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(5000):
            x = x + 1e-6
        return x

    check(f, seeds=[0])


def test_tensor_subclasses_keep_their_gradients() -> None:
    class Labelled(torch.Tensor):
        pass

    check(lambda x: (x * 2).as_subclass(Labelled))


def test_a_module_hook_runs_once_for_each_use() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    calls: list[int] = []
    module.register_full_backward_hook(lambda *_: calls.append(1))
    workers = Workers(2, engine_waits=0)
    x, v = torch.ones(3, requires_grad=True), torch.ones(3)
    workers.backward(0, [residual(module, x, v, workers.cross)])
    assert len(calls) == 2


def test_hooks_see_the_context_of_their_pass_on_every_worker() -> None:
    workers = Workers(2)
    x = torch.ones(3, requires_grad=True)
    seen = []
    (there,) = workers.cross(0, 1, [x])
    there.register_hook(lambda g: seen.append(current_context()))
    (back,) = workers.cross(1, 0, [there * 2])
    back.register_hook(lambda g: seen.append(current_context()))
    x.register_hook(lambda g: seen.append(current_context()))
    workers.backward(0, [back.sum()])
    assert seen == [workers.context(0), workers.context(1), workers.context(0)]
    assert current_context() is None


def test_hooks_of_an_unused_tensor_of_a_message_are_not_called() -> None:
    workers = Workers(2)
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    used, unused = workers.cross(0, 1, [x, y])
    unused.register_hook(lambda g: pytest.fail("called"))
    (back,) = workers.cross(1, 0, [used * 2])
    workers.backward(0, [back.sum()])
    assert workers.gradient(0, x) is not None
    assert workers.gradient(0, y) is None


def test_buffers_are_freed_unless_the_graph_is_retained() -> None:
    workers = Workers(2)
    x, v = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = residual(torch.exp, x, v, workers.cross)
    workers.backward(0, [loss], retain_graph=True)
    workers.backward(0, [loss])
    with pytest.raises((RuntimeError, PassFailed), match="a second time"):
        workers.backward(0, [loss])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("engine_waits", [0, 1])
def test_the_graph_goes_with_its_context_without_the_garbage_collector(
    fails: bool, engine_waits: float
) -> None:
    class Big:
        pass

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, big: Big) -> Tensor:
            ctx.big = big
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            if fails:
                raise ValueError("on purpose")
            return g, None

    def run() -> weakref.ref[Big]:
        big = Big()
        workers = Workers(2, engine_waits=engine_waits)
        x, v = torch.ones(3, requires_grad=True), torch.ones(3)
        loss = residual(lambda t: Keeps.apply(t.exp(), big), x, v, workers.cross)
        try:
            workers.backward(0, [loss])
        except ValueError:
            assert fails
        workers.release()
        return weakref.ref(big)

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
