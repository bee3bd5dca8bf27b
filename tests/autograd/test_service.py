"""Contexts over several workers: where they appear, and that nothing of them stays."""

from __future__ import annotations

import pytest
import torch

from tests.autograd.harness import Workers


def test_a_release_reaches_workers_that_the_origin_never_called() -> None:
    workers = Workers(4)
    x = torch.ones(2, requires_grad=True)
    for source, target in [(0, 1), (1, 2), (2, 3)]:
        (x,) = workers.cross(source, target, [x])
    assert len(workers.leftovers()) == 4
    workers.release()
    assert workers.leftovers() == {}


@pytest.mark.parametrize("seed", range(10))
def test_a_message_that_arrives_after_the_release_leaves_no_trace(seed: int) -> None:
    workers = Workers(3, seed, in_order=False)
    x = torch.ones(2, requires_grad=True)
    workers.cross(0, 1, [x])
    workers.cross_late(0, 1, [x])
    workers.cross_late(0, 2, [x])
    workers.cross_late(1, 2, [torch.ones(1)])
    workers.release()
    assert workers.leftovers() == {}


def test_the_context_of_a_lost_origin_ends_on_the_others() -> None:
    workers = Workers(3)
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    workers.cross(1, 2, [there])
    workers.kill(0)
    assert workers.leftovers().keys() == {"worker0"}


def test_a_release_reaches_those_behind_a_worker_that_died() -> None:
    workers = Workers(4)
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    (further,) = workers.cross(1, 2, [there])
    workers.cross(2, 3, [further])
    workers.kill(1)
    workers.release()
    assert workers.leftovers().keys() == {"worker1"}


def test_those_behind_a_worker_that_died_with_the_news_of_a_release_hear_it_too() -> None:
    workers = Workers(4)
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    (further,) = workers.cross(1, 2, [there])
    workers.cross(2, 3, [further])
    workers.nodes[0].autograd.release(workers.context_id)
    workers.kill(1)
    workers.network.drain()
    assert workers.leftovers().keys() == {"worker1"}


def test_contexts_are_apart_although_they_share_a_leaf() -> None:
    workers = Workers(2)
    w = torch.ones(2, requires_grad=True)
    first = workers.context_id
    (back,) = workers.cross(1, 0, [w * 2])
    workers.backward(0, [back.sum()])
    workers.context_id = workers.nodes[0].autograd.new_context().id
    (back,) = workers.cross(1, 0, [w * 3])
    workers.backward(0, [back.sum()])
    assert torch.equal(workers.gradient(1, w), torch.full((2,), 3.0))
    workers.context_id = first
    assert torch.equal(workers.gradient(1, w), torch.full((2,), 2.0))


def test_counts_show_the_pass_while_it_runs() -> None:
    workers = Workers(2)
    seen = []
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    there.register_hook(lambda g: seen.append(workers.nodes[1].autograd.counts()))
    (back,) = workers.cross(1, 0, [there * 2])
    workers.backward(0, [back.sum()])
    assert seen == [{"num_autograd_contexts": 1, "num_current_backward_passes": 1}]
    assert workers.nodes[1].autograd.counts()["num_current_backward_passes"] == 0
