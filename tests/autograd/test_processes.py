"""Distributed autograd between real processes."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import api, participant
from telegrad.autograd.errors import AutogradError, PassFailed, UnusedResult
from telegrad.rpc.errors import RemoteTraceback
from tests.autograd.comparison import Skip
from tests.autograd.conducted import leftovers
from tests.autograd.failing import Fails
from tests.autograd.processes import compare_over_processes

WEIGHT = torch.full((3,), 2.0, requires_grad=True)


def weighted(x: Tensor) -> Tensor:
    return x * WEIGHT


def gradient_of_weight(context_id: int) -> Tensor | None:
    return api.get_gradients(context_id).get(WEIGHT)


def along(x: Tensor, route: list[str]) -> Tensor:
    """`x` doubled on each worker of the route, by calls that nest."""
    if not route:
        return x
    result: Tensor = rpc.rpc_sync(route[0], along, args=(x * 2, route[1:]))
    return result


def failing(x: Tensor) -> Tensor:
    return Fails.apply(x)


def context_here() -> int:
    return api.require_context().id


def wait_until_clean(names: list[str]) -> None:
    """Releases are messages: they take effect soon, not at once."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        held = [rpc.rpc_sync(name, leftovers) for name in names]
        if not any(any(counts.values()) for counts in held):
            return
        threading.Event().wait(0.01)
    pytest.fail(f"still held: {held}")


def test_a_gradient_reaches_leaves_on_both_workers(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        y = rpc.rpc_sync("one", weighted, args=(x,))
        api.backward(context_id, [(y * y).sum()])
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 8.0))
        there = rpc.rpc_sync("one", gradient_of_weight, args=(context_id,))
        assert torch.equal(there, torch.full((3,), 4.0))
    assert x.grad is None
    wait_until_clean(names)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_nested_calls_that_come_back(names: list[str], mode: str) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        y = along(x, ["one", "main", "two", "one", "main", "three"])
        api.backward(context_id, [y.sum()], mode=mode)
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 64.0))
    wait_until_clean(names)


def test_remote_functions_see_the_context_of_their_caller(names: list[str]) -> None:
    with api.context() as context_id:
        assert rpc.rpc_sync("one", context_here) == context_id
    with pytest.raises(AutogradError, match="does not work in an autograd context"):
        rpc.rpc_sync("one", context_here)


def test_passes_of_eight_threads_at_once_stay_apart(names: list[str]) -> None:
    found: dict[int, Tensor] = {}

    def train(number: int) -> None:
        x = torch.full((3,), float(number), requires_grad=True)
        for _ in range(5):
            with api.context() as context_id:
                y = rpc.rpc_sync(names[1 + number % 3], weighted, args=(x,))
                z = rpc.rpc_sync(names[1 + (number + 1) % 3], weighted, args=(y * x,))
                api.backward(context_id, [z.sum()])
                found[number] = api.get_gradients(context_id)[x]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {n: torch.full((3,), 8.0 * n) for n in range(8)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    wait_until_clean(names)


def test_an_error_on_the_way_names_its_worker_and_the_context_stays_usable(
    names: list[str],
) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        bad = rpc.rpc_sync("two", failing, args=(along(x, ["one"]),))
        for _ in range(3):
            with pytest.raises(PassFailed, match="Error on Node 2: on purpose") as caught:
                api.backward(context_id, [bad.sum()], retain_graph=True)
            assert isinstance(caught.value.__cause__, RemoteTraceback)
            assert caught.value.__cause__.worker == "two"
        good = along(x, ["one", "two"])
        api.backward(context_id, [good.sum()])
        assert torch.equal(api.get_gradients(context_id)[x], torch.full((3,), 4.0))
    wait_until_clean(names)


def test_fast_mode_names_the_result_that_was_not_used(names: list[str]) -> None:
    service = api.autograd_of()
    x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    service.stall_time, patience = 0.2, service.stall_time
    try:
        with api.context() as context_id:
            rpc.rpc_sync("one", along, args=(y, []))
            with pytest.raises((UnusedResult, PassFailed), match=r"never used .*\(2,\)"):
                api.backward(context_id, [along(x, ["one"]).sum()], mode="fast")
    finally:
        service.stall_time = patience
    wait_until_clean(names)


def test_a_result_that_comes_during_the_pass_does_not_hold_it_up(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun before, nobody uses it, and its sender waits to be told so."""
    monkeypatch.setattr(participant, "PATIENCE", 60.0)
    for _ in range(6):
        x = torch.ones(3, requires_grad=True)
        with api.context() as context_id:
            y = rpc.rpc_sync(names[1], weighted, args=(x,))
            unused = rpc.rpc_async(names[2], weighted, args=(y,))
            api.backward(context_id, [y.sum()], timeout=20)
            torch.testing.assert_close(api.get_gradients(context_id)[x], torch.full((3,), 2.0))
            unused.wait()


def with_its_first_row(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 3
    return y, y[0]


def changed_in_place(y: Tensor, row: Tensor) -> Tensor:
    squares = row * row
    y.mul_(2)
    return squares.sum() + y.sum()


@pytest.mark.parametrize("way", ["results", "arguments"])
def test_tensors_that_shared_memory_may_be_changed_in_place_on_arrival(
    names: list[str], way: str
) -> None:
    """One process refuses it; here each is a tensor of its own, and so are their gradients."""
    x = torch.rand(2, 3, requires_grad=True)
    y, row = with_its_first_row(x)
    expected = changed_in_place(y.clone(), row.clone())
    (gradient,) = torch.autograd.grad(expected, x)
    with api.context() as context_id:
        if way == "results":
            loss = changed_in_place(*rpc.rpc_sync(names[1], with_its_first_row, args=(x,)))
        else:
            loss = rpc.rpc_sync(names[1], changed_in_place, args=with_its_first_row(x))
        api.backward(context_id, [loss])
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(api.get_gradients(context_id)[x], gradient)


def test_no_bound_is_no_bound(names: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with api.context() as context_id:
        parts = [rpc.rpc_sync(name, along, args=(x, [names[0]])) for name in names[1:]]
        api.backward(context_id, [torch.stack(parts).sum()], timeout=0)
        assert x in api.get_gradients(context_id)


def test_gradients_of_gradients_between_processes(names: list[str]) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with api.context() as context_id:
        y = rpc.rpc_sync("one", torch.pow, args=(x, 3))
        api.backward(context_id, [y.sum()], create_graph=True)
        first = api.get_gradients(context_id)[x]
        assert torch.allclose(first, 3 * x.detach() ** 2)
        api.backward(context_id, [(first * first).sum()])
        total = api.get_gradients(context_id)[x]
        assert torch.allclose(total - first, 36 * x.detach() ** 3)


@pytest.mark.parametrize(
    ("features", "count"), [("hook,custom,module,passes", 25), ("late,post,sparse,checkpoint", 15)]
)
def test_random_programs(names: list[str], features: str, count: int) -> None:
    tally: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(count):
            try:
                chosen = frozenset(features.split(","))
                tally[compare_over_processes(seed, chosen, names)] += 1
            except Skip:
                tally["skipped"] += 1
            except Exception as error:
                error.add_note(f"seed {seed}, features {features}")
                raise
    assert tally["equal"] > count / 2
    wait_until_clean(names)
