"""Backward passes that begin in compiled functions find what those of eager mode find, or say why
they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.compile import functions as f
from tests.compile.checks import BACKENDS, compiled

pytestmark = pytest.mark.usefixtures("job")


def in_parts(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """The function, compiled, in as many graphs as it takes."""
    return torch.compile(function, backend=backend)


def gradient(function: Callable[[int, Tensor], object], make: Callable[[Tensor], Tensor]) -> Tensor:
    """Of what `make` is given, if `function` gets what it makes and calls backward."""
    x = torch.linspace(0.1, 1, 6).reshape(2, 3).requires_grad_()
    with autograd.context() as context_id:
        function(context_id, make(x))
        return autograd.get_gradients(context_id)[x]


# What was computed outside of the compiled function.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_breaks_into_several_graphs_trains_as_in_eager_mode(backend: str) -> None:
    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        remote = RemoteModule("worker1", nn.Linear, (3, 3))
        remote.load_state_dict(nn.Linear(3, 3).state_dict())
        local = nn.Linear(3, 3)
        optimizer = DistributedOptimizer(torch.optim.SGD, [remote, local], lr=0.1)
        losses = []

        def step(x: Tensor) -> None:
            with autograd.context() as context_id:
                loss = local(remote(x)).pow(2).mean()
                losses.append(loss.item())
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)

        run = in_parts(step, backend) if compiled else step
        for _ in range(3):
            run(torch.randn(4, 3))
        return [torch.tensor(losses), local.weight.detach(), remote.state_dict()["weight"]]

    torch.testing.assert_close(trained(True), trained(False))


def backward_of_sum(context_id: int, y: Tensor) -> None:
    autograd.backward(context_id, [y.sum()])


def backward_of_call(context_id: int, y: Tensor) -> None:
    autograd.backward(context_id, [rpc.rpc_sync("worker1", f.layer, (y.sin(), y)).sum()])


def outcome_of_call(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker1", f.layer, (x, x))


@pytest.mark.parametrize("make", [outcome_of_call, Tensor.sin], ids=["remote", "local"])
@pytest.mark.parametrize("function", [backward_of_sum, backward_of_call])
def test_backward_of_what_was_computed_outside_finds_its_gradients(
    function: Callable[[int, Tensor], None], make: Callable[[Tensor], Tensor]
) -> None:
    expected = gradient(function, make)
    run = in_parts(function)
    for _ in range(2):
        torch.testing.assert_close(gradient(run, make), expected)


@pytest.mark.parametrize("function", [backward_of_sum, backward_of_call])
def test_backward_of_what_was_computed_outside_is_refused_in_one_graph(
    function: Callable[[int, Tensor], None],
) -> None:
    run, _ = compiled(function, "aot_eager")
    with pytest.raises(autograd.AutogradError, match="needs its whole local graph inside"):
        gradient(run, Tensor.sin)


def test_an_argument_that_was_a_leaf_and_is_computed_the_next_time_is_noticed() -> None:
    run = in_parts(backward_of_call)
    for make in (Tensor.requires_grad_, Tensor.sin, Tensor.requires_grad_):
        torch.testing.assert_close(gradient(run, make), gradient(backward_of_call, make))
    run, counter = compiled(backward_of_call, "aot_eager")
    for _ in range(3):
        gradient(run, Tensor.requires_grad_)
    assert counter.frame_count <= 2, "the number of the context is a constant once"
    with pytest.raises(autograd.AutogradError, match="needs its whole local graph inside"):
        gradient(run, Tensor.sin)


def test_a_reference_of_another_graph_has_a_part_of_its_graph_there() -> None:
    def make(x: Tensor) -> Any:
        return rpc.remote("worker1", f.layer, (x * 2, x))

    def use(context_id: int, reference: Any) -> None:
        autograd.backward(context_id, [reference.to_here().sum()])

    make_fast, _ = compiled(make, "aot_eager")
    torch.testing.assert_close(gradient(in_parts(use), make_fast), gradient(use, make))


# Hooks of leaves.


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_of_parameters_see_and_change_gradients_of_a_backward_inside(backend: str) -> None:
    calls: list[str] = []

    def double(gradient: Tensor) -> Tensor:
        calls.append("double")
        return gradient * 2

    def look(gradient: Tensor) -> None:
        calls.append("look")

    def trained(compile_it: bool) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        calls.clear()
        local = nn.Linear(3, 3)
        optimizer = DistributedOptimizer(torch.optim.SGD, [local], lr=0.1)

        def step(x: Tensor) -> None:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", f.layer, (local(x), x)).pow(2).sum()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)

        run = compiled(step, backend)[0] if compile_it else step
        x = torch.randn(2, 3)
        handle = local.weight.register_hook(double)
        run(x)
        local.bias.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
        local.weight.register_hook(look)
        run(x)
        handle.remove()
        run(x)
        return [local.weight.detach(), local.bias.detach()], list(calls)

    (expected, called), (got, called_inside) = trained(False), trained(True)
    torch.testing.assert_close(got, expected)
    assert sorted(called_inside) == sorted(called)


def test_a_hook_that_fails_in_a_backward_inside_fails_the_pass() -> None:
    def refuse(gradient: Tensor) -> None:
        raise LookupError("not this gradient")

    def step(x: Tensor) -> None:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", f.layer, (x * weight, x)).sum()
            autograd.backward(context_id, [loss])

    weight = nn.Parameter(torch.ones(3))
    run, _ = compiled(step, "aot_eager")
    handle = weight.register_hook(refuse)
    with pytest.raises(LookupError, match="not this gradient"):
        run(torch.ones(2, 3))
    handle.remove()
    run(torch.ones(2, 3))


# What cannot begin a pass.


def called(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker1", f.layer, (x, x))


@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "several"])
@pytest.mark.parametrize(
    ("roots", "options"),
    [
        (lambda x: [called(x)], {}),
        (lambda x: [called(x.detach()).detach().sum()], {}),
        (lambda x: [x[:1, :1].detach().requires_grad_()], {}),
        (lambda x: [], {}),
        (lambda x: called(x).sum(), {}),
        (lambda x: [called(x).sum()], {"timeout": -1}),
        (lambda x: [called(x).sum()], {"mode": "nonsense"}),
    ],
    ids=["no scalar", "no gradient", "a leaf", "none", "no list", "timeout", "mode"],
)
def test_a_backward_inside_refuses_what_that_of_eager_mode_refuses(
    roots: Callable[[Tensor], Any], options: dict[str, Any], one_graph: bool
) -> None:
    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            autograd.backward(context_id, roots(x), **options)
        return x * 1

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises((autograd.AutogradError, TypeError, ValueError)) as eager:
        step(x)
    run = compiled(step, "aot_eager")[0] if one_graph else in_parts(step)
    with pytest.raises(eager.type) as inside:
        run(x)
    # Dynamo adds where it was.
    assert str(inside.value).split("\n")[0] == str(eager.value)
