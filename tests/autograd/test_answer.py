"""The initiator of a pass asks, and reads what the worker says next by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from telegrad.autograd.messages import Begin, Options, encode
from tests.autograd.harness import Workers


def chain(workers: Workers, x: Tensor, hops: int) -> Tensor:
    """`x`, a value of worker 0, goes to worker 1 and comes back so many times, doubled there."""
    for _ in range(hops):
        (there,) = workers.cross(0, 1, [x])
        (x,) = workers.cross(1, 0, [there * 2])
    return x.sum()


def test_a_chain_back_and_forth_is_gone_back_by_who_asks() -> None:
    workers = Workers(2)
    x = torch.ones(2, requires_grad=True)
    workers.backward(0, [chain(workers, x, 5)])
    assert torch.equal(workers.gradient(0, x), torch.full((2,), 2.0**5))
    said = [pending.frame[0] for pending in workers.nodes[0]._asked]
    assert len(said) == 5
    assert None not in said


def test_who_is_asked_again_lets_go_of_the_first_question() -> None:
    """Without this a call of the initiator would stay open on the worker for ever."""
    workers = Workers(2)
    chain(workers, torch.ones(2, requires_grad=True), 1)
    context, service = workers.context(0), workers.nodes[0].autograd
    initiator, history = service._initiate(context)
    begin = encode(context.id, initiator.pass_id, Begin(Options(), history))
    answers: list[tuple[int, object]] = []
    for number in (1, 2):
        later = workers.nodes[1].autograd._on_asked(0, begin)
        assert later is not None
        later.subscribe(lambda payload, error, number=number: answers.append((number, payload)))
    assert answers[0] == (1, None)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("in_order", [True, False])
def test_whatever_comes_first_no_answer_is_lost(seed: int, in_order: bool) -> None:
    workers = Workers(3, seed, in_order=in_order)
    x = torch.ones(2, requires_grad=True)
    loss = chain(workers, x, 2)
    for _ in range(2):
        (there,) = workers.cross(0, 2, [x])
        (back,) = workers.cross(2, 1, [there * 3])
        (home,) = workers.cross(1, 0, [back + 1])
        loss = loss + home.sum() + chain(workers, home, 2)
    workers.backward(0, [loss])
    want = 4.0 + 2 * (3.0 + 4 * 3.0)
    assert torch.equal(workers.gradient(0, x), torch.full((2,), want))
    workers.network.drain()
    assert all(pending.done for pending in workers.nodes[0]._asked)
