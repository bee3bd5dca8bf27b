"""Contexts over several workers: where they appear, and that nothing of them stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from telegrad.autograd.crossing import AutogradCrossing, Note
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


def test_the_first_message_of_the_next_context_lets_go_of_what_the_last_one_left() -> None:
    workers = Workers(3)
    w = torch.ones(2, requires_grad=True)
    (there,) = workers.cross(2, 1, [w * 2])
    (back,) = workers.cross(1, 0, [there])
    workers.cross(0, 1, [torch.ones(1)])
    workers.backward(0, [back.sum()])
    first = workers.context_id
    assert workers.gradient(2, w) is not None
    workers.nodes[0].autograd.release(first)
    workers.context_id = workers.nodes[0].autograd.new_context().id
    workers.cross(0, 2, [torch.ones(1)])
    held = workers.nodes[2].autograd.container.get(first)
    assert held.released
    assert not held.sends
    assert not held.gradients()
    workers.release()
    assert workers.leftovers() == {}


def test_gradients_go_with_their_context_and_not_with_the_garbage_collector() -> None:
    workers = Workers(2)
    w = torch.ones(2, requires_grad=True)
    (back,) = workers.cross(1, 0, [w * 2])
    v = torch.ones(2, requires_grad=True)
    gc.disable()
    try:
        workers.backward(0, [(back * v).sum()])
        kept = [weakref.ref(workers.gradient(1, w)), weakref.ref(workers.gradient(0, v))]
        assert all(gradient() is not None for gradient in kept)
        del back
        workers.release()
        assert [gradient() for gradient in kept] == [None, None]
    finally:
        gc.enable()


def test_those_behind_a_worker_that_let_go_early_hear_of_the_release_too() -> None:
    workers = Workers(3)
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    workers.cross(1, 2, [there])
    workers.nodes[0].autograd.release(workers.context_id)
    workers.context_id = workers.nodes[0].autograd.new_context().id
    workers.cross(0, 1, [torch.ones(1)])
    assert workers.nodes[2].autograd.counts()["num_autograd_contexts"] == 1
    workers.network.drain()
    assert workers.nodes[2].autograd.counts()["num_autograd_contexts"] == 0


def test_a_context_beside_another_one_that_is_open_ends_nothing() -> None:
    workers = Workers(2)
    w = torch.ones(2, requires_grad=True)
    (back,) = workers.cross(1, 0, [w * 2])
    workers.backward(0, [back.sum()])
    first, workers.context_id = workers.context_id, workers.nodes[0].autograd.new_context().id
    workers.cross(0, 1, [torch.ones(1)])
    workers.context_id = first
    assert torch.equal(workers.gradient(1, w), torch.full((2,), 2.0))


def test_only_the_origin_of_a_context_ends_those_before_it() -> None:
    workers = Workers(3)
    workers.cross(0, 1, [torch.ones(1)])
    later = workers.nodes[0].autograd.new_context().id
    note = Note(later, alone=True).pack()
    AutogradCrossing().arriving(workers.nodes[1], 2, note, [])
    assert not workers.context(1).released


def test_counts_show_the_pass_while_it_runs() -> None:
    workers = Workers(2)
    seen = []
    (there,) = workers.cross(0, 1, [torch.ones(2, requires_grad=True)])
    there.register_hook(lambda g: seen.append(workers.nodes[1].autograd.counts()))
    (back,) = workers.cross(1, 0, [there * 2])
    workers.backward(0, [back.sum()])
    assert seen == [{"num_autograd_contexts": 1, "num_current_backward_passes": 1}]
    assert workers.nodes[1].autograd.counts()["num_current_backward_passes"] == 0
