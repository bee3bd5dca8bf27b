"""Backward hooks of modules in compiled functions, around remote calls and on remote modules.

Dynamo takes such modules while compiled autograd is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from tests.compile import functions as f
from tests.compile.checks import BACKENDS, compiled

pytestmark = pytest.mark.usefixtures("job")


class Hooks:
    """Change the gradients and note the order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def put_on(self, module: nn.Module, name: str, factor: float) -> list[Any]:
        def hook(_: nn.Module, inputs: Any, outputs: Any) -> Any:
            self.calls.append(f"{name} after")
            return tuple(None if g is None else g * factor for g in inputs)

        def pre_hook(_: nn.Module, outputs: Any) -> Any:
            self.calls.append(f"{name} before")
            return tuple(g * factor for g in outputs)

        return [
            module.register_full_backward_hook(hook),
            module.register_full_backward_pre_hook(pre_hook),
        ]

    def take(self) -> list[str]:
        taken, self.calls = self.calls, []
        return taken


@pytest.mark.parametrize("around_backward", [False, True], ids=["forward only", "backward too"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_module_hooks_run_once_in_order_and_change_gradients(
    backend: str, around_backward: bool
) -> None:
    hooks = Hooks()
    # In float32 the gradients, which hooks enlarge, differ by more than is allowed now and then.
    kind = {"dtype": torch.float64}
    first, last = nn.Linear(3, 3, **kind), nn.Linear(3, 3, **kind)
    remote = RemoteModule("worker1", nn.Linear, (3, 3), kind)
    for factor, (name, module) in enumerate(
        {"first": first, "remote": remote, "last": last}.items(), start=2
    ):
        hooks.put_on(module, name, factor)

    def forward(x: Tensor) -> Tensor:
        return last(remote(first(x).tanh())).pow(2).sum()

    x = torch.randn(4, 3, **kind, requires_grad=True)
    leaves = [x, first.weight, last.weight]

    def differentiated(function: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[str]]:
        with autograd.context() as context_id:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
                loss = function(x)
                if around_backward:
                    autograd.backward(context_id, [loss], timeout=60)
            if not around_backward:
                autograd.backward(context_id, [loss], timeout=60)
            found = autograd.get_gradients(context_id)
        return [found[leaf] for leaf in leaves], hooks.take()

    expected, calls = differentiated(forward)
    assert calls == [f"{n} {w}" for n in ("last", "remote", "first") for w in ("before", "after")]
    fast, counter = compiled(forward, backend)
    for _ in range(2):
        got, calls_of_compiled = differentiated(fast)
        assert calls_of_compiled == calls
        torch.testing.assert_close(got, expected)
    assert counter.frame_count == 1


def test_torch_says_where_backward_goes_when_hooks_are_compiled() -> None:
    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = remote(x).sum()
            autograd.backward(context_id, [loss])
        return loss.detach()

    remote = RemoteModule("worker1", nn.Linear, (3, 3))
    Hooks().put_on(remote, "remote", 2)
    run, _ = compiled(step, "aot_eager")
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
        pytest.raises(Exception, match=r"outside the torch\.compile region"),
    ):
        run(torch.ones(4, 3))


def test_hooks_that_come_and_go_between_calls_are_noticed() -> None:
    """Torch leaves out the guard that a module has no hooks."""
    hooks = Hooks()
    local, remote = nn.Linear(3, 3), RemoteModule("worker1", nn.Linear, (3, 3))

    def gradients(function: Callable[[Tensor], Tensor]) -> Tensor:
        with autograd.context() as context_id:
            autograd.backward(context_id, [function(x)], timeout=20)
            return autograd.get_gradients(context_id)[x]

    def scaled(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 3

    def eager(x: Tensor) -> Tensor:
        return remote(local(x).tanh()).pow(2).sum()

    x = torch.randn(4, 3, requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        run, counter = compiled(eager, "aot_eager")
        for module in (local, remote):
            torch.testing.assert_close(gradients(run), gradients(eager))
            handles = hooks.put_on(module, "it", 2)
            torch.testing.assert_close(gradients(run), gradients(eager))
            called = hooks.take()
            assert called[: len(called) // 2] == called[len(called) // 2 :] != []
            for handle in handles:
                handle.remove()
            torch.testing.assert_close(gradients(run), gradients(eager))
            assert hooks.take() == []
            handle = module.register_forward_hook(scaled)
            torch.testing.assert_close(gradients(run), gradients(eager))
            handle.remove()
            torch.testing.assert_close(gradients(run), gradients(eager))
    assert counter.frame_count == 5


def test_hooks_of_all_modules_that_come_and_go_between_calls_are_noticed() -> None:
    """Torch guards the types of their tables only."""
    local = nn.Linear(3, 3)

    def eager(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.say, (local(x), "hooks"))

    def before(_: nn.Module, inputs: Any) -> Any:
        return (inputs[0] * 3,)

    def after(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 5

    x = torch.randn(4, 3)
    run, counter = compiled(eager, "aot_eager")
    torch.testing.assert_close(run(x), eager(x))
    for put, hook in (
        (register_module_forward_pre_hook, before),
        (register_module_forward_hook, after),
    ):
        handle = put(hook)  # type: ignore[operator]
        try:
            torch.testing.assert_close(run(x), eager(x))
        finally:
            handle.remove()
        torch.testing.assert_close(run(x), eager(x))
    assert counter.frame_count == 3
