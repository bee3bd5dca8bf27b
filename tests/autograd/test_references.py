"""`RRef.backward` between real processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import AutogradError, PassFailed, UnknownContext, api
from tests.autograd.test_processes import failing, gradient_of_weight, wait_until_clean, weighted


def weighted_sum(x: Tensor) -> Tensor:
    return weighted(x).sum()


def failing_sum(x: Tensor) -> Tensor:
    return failing(x).sum()


def backward_of(rref: rpc.RRef[Tensor], context_id: int) -> None:
    rref.backward(context_id)


def some_text() -> str:
    return "no tensor"


def test_the_owner_without_a_context_runs_plain_backward(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    rref = rpc.RRef((x * x).sum())
    rref.backward(retain_graph=True)
    rref.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_the_owner_without_a_context_meets_the_errors_of_torch(names: list[str]) -> None:
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        rpc.RRef(torch.ones(())).backward()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        rpc.RRef(torch.ones(3, requires_grad=True) * 2).backward()


def test_the_owner_in_a_context_leaves_grad_alone(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        rref = rpc.RRef(rpc.rpc_sync("one", weighted, args=(x,)).sum())
        rref.backward(context_id)
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 2.0))
        there = rpc.rpc_sync("one", gradient_of_weight, args=(context_id,))
        assert torch.equal(there, torch.ones(3))
    assert x.grad is None
    wait_until_clean(names)


def test_a_user_has_the_owner_begin_and_passes_add_up(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        rref = rpc.remote("one", weighted_sum, args=(x,))
        rref.backward(context_id, retain_graph=True)
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 2.0))
        rref.backward(context_id)
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 4.0))
    wait_until_clean(names)


def test_a_user_that_was_handed_the_reference_may_begin_too(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        rref = rpc.remote("one", weighted_sum, args=(x,))
        rpc.rpc_sync("two", backward_of, args=(rref, context_id))
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 2.0))
    wait_until_clean(names)


def test_a_user_without_a_context_is_told_that_it_needs_one(names: list[str]) -> None:
    rref = rpc.remote("one", weighted_sum, args=(torch.ones(3),))
    with pytest.raises(AutogradError, match="User RRefs require 'dist_autograd_ctx_id'"):
        rref.backward()


@pytest.mark.parametrize("owner", ["main", "one"])
def test_an_unknown_context_is_named(names: list[str], owner: str) -> None:
    rref = rpc.remote(owner, weighted_sum, args=(torch.ones(3),))
    with pytest.raises(UnknownContext, match=r"^Could not find autograd context with id: 100\. A"):
        rref.backward(100)


@pytest.mark.parametrize("owner", ["main", "one"])
def test_a_value_that_is_no_tensor_is_refused(names: list[str], owner: str) -> None:
    rref = rpc.remote(owner, some_text)
    with (
        api.context() as context_id,
        pytest.raises(AutogradError, match=r"should contain a tensor for .backward\(\).* a str"),
    ):
        rref.backward(context_id)


def test_a_root_that_is_no_scalar_is_refused_on_the_owner(names: list[str]) -> None:
    with api.context() as context_id:
        rref = rpc.remote("one", weighted, args=(torch.ones(3),))
        with pytest.raises(AutogradError, match="is not a scalar"):
            rref.backward(context_id)


def test_an_error_in_the_pass_reaches_the_user(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        rref = rpc.remote("one", failing_sum, args=(x,))
        with pytest.raises((PassFailed, ValueError), match="on purpose"):
            rref.backward(context_id)
    wait_until_clean(names)


def test_a_value_that_could_not_be_made_says_why(names: list[str]) -> None:
    with api.context() as context_id:
        rref = rpc.remote("one", weighted_sum, args=("no tensor at all",))
        with pytest.raises(TypeError):
            rref.backward(context_id)
