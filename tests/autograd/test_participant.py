"""Passes over several workers: endings good and bad."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from telegrad.autograd.backward import Post
from telegrad.autograd.errors import (
    AutogradError,
    BadGradient,
    ContextLost,
    PassFailed,
    PassLost,
    UnusedResult,
)
from telegrad.autograd.messages import Absent, Gradient, History, Message, Mode, Options
from telegrad.rpc.errors import CallTimeout, JobClosed, RemoteTraceback, WorkerLost
from tests.autograd.failing import Fails
from tests.autograd.harness import Workers


def ring(workers: Workers, x: Tensor, route: list[int], fail_at: int | None = None) -> Tensor:
    """`x`, a value of worker 0, goes along the route and back to 0, doubled at each stop."""
    at = 0
    for stop in [*route, 0]:
        (x,) = workers.cross(at, stop, [x])
        at = stop
        x = Fails.apply(x) if stop == fail_at else x * 2
    return x.sum()


def test_a_route_that_comes_back_many_times() -> None:
    workers = Workers(3)
    x = torch.ones(2, requires_grad=True)
    workers.backward(0, [ring(workers, x, [1, 0, 2, 1, 0, 2])])
    assert torch.equal(workers.gradient(0, x), torch.full((2,), 2.0**7))


@pytest.mark.parametrize("route", [[1], [1, 0, 1, 0, 2], [1, 1, 2]])
def test_where_every_tensor_is_used_smart_costs_no_message_on_the_way(route: list[int]) -> None:
    sent = []
    for mode in (Mode.FAST, Mode.SMART):
        workers = Workers(3)
        x = torch.ones(2, requires_grad=True)
        workers.backward(0, [ring(workers, x, route)], mode=mode)
        sent.append(workers.network.sent)
    fast, smart = sent
    assert fast["gradient"] == len(route) + 1
    assert fast.get("ack", 0) <= len(set(route) - {0})
    # A worker that only gets a gradient at the end of a long way may be told before.
    assert smart.get("begin", 0) <= 1
    if route[0] == route[-1]:
        assert smart == fast


def test_passes_add_up() -> None:
    workers = Workers(2)
    x = torch.ones(2, requires_grad=True)
    loss = ring(workers, x, [1])
    for _ in range(5):
        workers.backward(0, [loss], retain_graph=True)
    assert torch.equal(workers.gradient(0, x), torch.full((2,), 20.0))


def test_a_worker_remembers_only_the_last_of_many_passes() -> None:
    workers = Workers(2)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1])
    for _ in range(30):
        workers.backward(0, [loss], retain_graph=True)
    assert len(workers.context(0).participants) == 0
    assert len(workers.context(1).participants) == 1


def test_an_error_on_a_worker_reaches_the_caller_with_name_and_traceback() -> None:
    workers = Workers(4)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1, 2, 3], fail_at=2)
    with pytest.raises(PassFailed, match="Error on Node 2: on purpose") as caught:
        workers.backward(0, [loss])
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert caught.value.__cause__.worker == "worker2"
    assert "raise ValueError" in caught.value.__cause__.text


class FailsWithoutWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        raise Wordless


class Wordless(Exception):
    def __str__(self) -> str:
        raise Wordless


def test_an_error_without_words_ends_the_pass() -> None:
    workers = Workers(2)
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    (back,) = workers.cross(1, 0, [FailsWithoutWords.apply(there)])
    with pytest.raises(PassFailed, match=r"Error on Node 1: \(its message") as e:
        workers.backward(0, [back.sum()])
    assert "Wordless" in str(e.value.__cause__)


def test_an_error_on_the_initiator_is_raised_as_it_is() -> None:
    workers = Workers(2)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1], fail_at=0)
    with pytest.raises(ValueError, match="on purpose"):
        workers.backward(0, [loss])


def test_what_a_failed_pass_found_does_not_count_anywhere() -> None:
    workers = Workers(3)
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    (there,) = workers.cross(0, 1, [x])
    (back,) = workers.cross(1, 0, [Fails.apply(there)])
    (other,) = workers.cross(2, 0, [w * 2])
    for _ in range(5):
        with pytest.raises(PassFailed):
            workers.backward(0, [back.sum() + other.sum()], retain_graph=True)
    workers.network.drain()
    assert workers.gradient(2, w) is None
    workers.backward(0, [other.sum()], retain_graph=True)
    assert torch.equal(workers.gradient(2, w), torch.full((2,), 2.0))
    assert all(node.autograd.counts()["num_current_backward_passes"] == 0 for node in workers.nodes)


def test_a_lost_worker_fails_the_pass_that_waits_for_it() -> None:
    workers = Workers(3)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1, 2])
    deliver = workers.network.deliver_one

    def kill_before_the_first_delivery(to: int | None = None) -> bool:
        workers.network.deliver_one = deliver
        workers.kill(2)
        return True

    workers.network.deliver_one = kill_before_the_first_delivery
    with pytest.raises(WorkerLost, match=r"Worker 'worker2' \(2\) is gone"):
        workers.backward(0, [loss])


def before_the_first_delivery(workers: Workers, happens: Callable[[], None]) -> None:
    deliver = workers.network.deliver_one

    def happen(to: int | None = None) -> bool:
        workers.network.deliver_one = deliver
        happens()
        return True

    workers.network.deliver_one = happen


def test_a_loss_that_another_participant_found_is_a_loss_to_who_leads_the_pass() -> None:
    workers = Workers(3)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1, 2])

    def die() -> None:
        workers.network.drop_of(2)
        workers.nodes[1].lose(2)

    before_the_first_delivery(workers, die)
    with pytest.raises(PassLost, match="Error on Node 1: Worker 'worker2'") as caught:
        workers.backward(0, [loss])
    assert (caught.value.worker, caught.value.cause) == ("worker2", "it was killed")
    assert caught.value.pending == f"the backward pass of context {workers.context(0).id}"


def test_what_is_done_in_a_context_whose_maker_is_lost_says_so() -> None:
    workers = Workers(3)
    (x,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    (there,) = workers.cross(1, 2, [x * 2])
    (back,) = workers.cross(2, 1, [there * 2])
    context_id = workers.context(1).id
    before_the_first_delivery(workers, lambda: workers.kill(0))
    with pytest.raises(ContextLost, match="'worker0'") as during:
        workers.backward(1, [back.sum()])
    with pytest.raises(ContextLost, match="'worker0'") as after:
        workers.nodes[1].autograd.context(context_id)
    for error in (during.value, after.value):
        assert (error.worker, error.cause) == ("worker0", "it was killed")
        assert error.pending == f"context {context_id}"


def test_a_worker_that_was_lost_before_the_pass_fails_it_at_once() -> None:
    workers = Workers(2)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1])
    workers.kill(1)
    with pytest.raises(WorkerLost, match="worker1"):
        workers.backward(0, [loss])


def test_the_loss_of_a_worker_that_shares_no_tensor_does_not_matter() -> None:
    workers = Workers(3)
    x = torch.ones(2, requires_grad=True)
    workers.cross(0, 2, [torch.ones(1)])
    loss = ring(workers, x, [1])
    workers.kill(2)
    workers.backward(0, [loss])
    assert workers.gradient(0, x) is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_message_ends_the_pass_and_leaves_nothing(seed: int) -> None:
    workers = Workers(4, seed)
    x = torch.ones(2, requires_grad=True)
    loss = ring(workers, x, [1, 2, 3, 1, 2])
    deliver, countdown = workers.network.deliver_one, [seed % 12]

    def deliver_and_kill(to: int | None = None) -> bool:
        countdown[0] -= 1
        if countdown[0] == 0:
            workers.kill(1 + seed % 3)
            return True
        return deliver(to)

    workers.network.deliver_one = deliver_and_kill
    try:
        workers.backward(0, [loss])
    except (PassFailed, WorkerLost) as error:
        problem: str | None = str(error)
    else:
        problem = None
    if problem is None:
        assert torch.equal(workers.gradient(0, x), torch.full((2,), 64.0))
    else:
        assert f"worker{1 + seed % 3}" in problem
    workers.network.deliver_one = deliver
    workers.release()
    survivors = {node.info.name for node in workers.nodes} - {f"worker{1 + seed % 3}"}
    assert not survivors & workers.leftovers().keys()


def test_a_pass_that_does_not_end_in_time_names_its_workers() -> None:
    workers = Workers(2)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1])
    workers.network.deliver_one = lambda to=None: False
    with pytest.raises(CallTimeout, match=r"did not end in 3 s.*\['worker1'\]"):
        workers.nodes[0].autograd.backward(workers.context(0), [loss], Options(), timeout=3)


@pytest.mark.parametrize("comes", [0, 1, 2])
def test_a_pass_ends_when_the_worker_that_waits_for_it_leaves(comes: int) -> None:
    """It may wait for an answer, or for what comes by itself."""
    workers = Workers(3)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1, 2])
    deliver, left = workers.network.deliver_one, [comes]

    def leave_after_some(to: int | None = None) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            return deliver(to)
        workers.network.deliver_one = lambda to=None: False
        workers.nodes[0].close()
        return True

    workers.network.deliver_one = leave_after_some
    with pytest.raises(JobClosed, match="Worker 'worker0' shut down during backward in context"):
        workers.backward(0, [loss])


def test_releasing_the_context_ends_a_pass_on_every_worker() -> None:
    workers = Workers(3)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: pytest.fail("the pass went on"))
    (there,) = workers.cross(0, 1, [x])
    (further,) = workers.cross(1, 2, [there])
    further.register_hook(lambda g: workers.nodes[0].autograd.release(workers.context_id))
    (back,) = workers.cross(2, 0, [further * 2])
    with pytest.raises(AutogradError, match="was released during backward"):
        workers.backward(0, [back.sum()])
    workers.network.drain()
    assert workers.leftovers() == {}


def forge(workers: Workers, message: Message, sender: int = 1) -> None:
    """Let a worker say something in the pass that comes next."""
    context = workers.context(sender)
    pass_id = (0 << 48) + 1
    workers.nodes[sender].autograd.post(context, pass_id, Post(0, message))


def gradient_of(workers: Workers, *gradients: Tensor | None, message: int = 1) -> Gradient:
    return Gradient(Options(), History(), False, message, gradients)


@pytest.mark.parametrize(
    ("gradients", "message", "sender", "complaint"),
    [
        ([torch.ones(3)], 1, 1, "its gradient"),
        ([torch.ones(2).double()], 1, 1, "torch.float64"),
        ([torch.ones(2)] * 2, 1, 1, "are 2, but 1 tensors need one"),
        ([torch.ones(2)], 99, 1, "message 99, which worker 'worker0' never sent"),
        ([torch.ones(2)], 1, 2, "came from worker 'worker2'"),
    ],
)
def test_a_forged_gradient_fails_the_pass_by_name(gradients, message, sender, complaint) -> None:
    workers = Workers(3)
    loss = ring(workers, torch.ones(2, requires_grad=True), [1])
    deliver = workers.network.deliver_one

    def forge_first(to: int | None = None) -> bool:
        workers.network.deliver_one = deliver
        workers.network.under_way.clear()
        forge(workers, gradient_of(workers, *gradients, message=message), sender)
        return deliver(to)

    workers.network.deliver_one = forge_first
    with pytest.raises(BadGradient, match=complaint):
        workers.backward(0, [loss])


def test_a_gradient_that_comes_twice_is_refused() -> None:
    workers = Workers(2)
    x = torch.ones(2, requires_grad=True)
    (there,) = workers.cross(0, 1, [x])
    workers.cross(0, 1, [x * 3])
    (back,) = workers.cross(1, 0, [there * 2])
    loss = back.sum()
    deliver = workers.network.deliver_one

    def twice(to: int | None = None) -> bool:
        workers.network.deliver_one = deliver
        workers.network.under_way.clear()
        for _ in range(2):
            forge(workers, gradient_of(workers, torch.ones(2)))
        return deliver(to)

    workers.network.deliver_one = twice
    with pytest.raises(BadGradient, match="came twice"):
        workers.backward(0, [loss])


def test_what_comes_after_the_pass_is_ignored() -> None:
    workers = Workers(2)
    x = torch.ones(2, requires_grad=True)
    workers.backward(0, [ring(workers, x, [1])])
    forge(workers, Absent((1,)))
    forge(workers, gradient_of(workers, torch.ones(7)))
    workers.network.drain()
    assert torch.equal(workers.gradient(0, x), torch.full((2,), 4.0))


@pytest.mark.parametrize("unused", ["argument", "result"])
def test_fast_mode_names_what_was_not_used(unused: str) -> None:
    workers = Workers(2)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, 5, requires_grad=True)
    loss = ring(workers, x, [1])
    (there,) = workers.cross(0, 1, [y])
    if unused == "result":
        workers.cross(1, 0, [there * 2])
    with pytest.raises(
        (UnusedResult, PassFailed), match=r"never used .* \(torch.float32 \(2, 5\)\)"
    ):
        workers.backward(0, [loss], retain_graph=True, mode=Mode.FAST)
    workers.backward(0, [loss])
    assert torch.equal(workers.gradient(0, x), torch.full((2,), 4.0))
    assert workers.gradient(0, y) is None


def test_smart_mode_needs_no_patience_for_what_is_not_used() -> None:
    workers = Workers(3)
    x = torch.ones(2, requires_grad=True)
    workers.cross(1, 2, workers.cross(0, 1, [x * 5]))
    workers.backward(0, [ring(workers, x, [1])])
    assert all(node.clock == 0 for node in workers.nodes)
