"""Gradients of several contexts in one step, each of them once."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import optim

from telegrad import autograd
from telegrad.optim import DistributedOptimizer, OptimizerError
from tests.optim.models import Local, Spread, batches, loss_of, stepped_once

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("in_last_context", [True, False])
def test_gradients_of_several_contexts_add_up_to_one_step(in_last_context: bool) -> None:
    local, spread = Local(), Spread()
    plain = optim.Adam(local.parameters(), lr=0.1)
    distributed = DistributedOptimizer(optim.Adam, spread, lr=0.1)
    for _ in range(2):
        plain.zero_grad()
        *firsts, last = batches(3)
        for batch in (*firsts, last):
            loss_of(local, batch).backward()
        plain.step()
        for batch in firsts:
            with autograd.context() as context_id:
                autograd.backward(context_id, [loss_of(spread, batch)])
                distributed.accumulate(context_id)
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(spread, last)])
            if in_last_context:
                distributed.step(context_id)
            else:
                distributed.accumulate(context_id)
        if not in_last_context:
            distributed.step()
    torch.testing.assert_close(dict(spread.state_dict()), dict(local.state_dict()))


def test_zero_grad_drops_what_was_accumulated() -> None:
    spread = Spread()
    before = copy.deepcopy(spread.state_dict())
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        optimizer.accumulate(context_id)
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match="nothing to apply"):
        optimizer.step()
    with autograd.context() as context_id:
        optimizer.step(context_id)
    torch.testing.assert_close(dict(spread.state_dict()), dict(before))


def test_the_gradients_of_a_context_never_count_twice() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    (batch,) = batches(1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batch)])
        optimizer.accumulate(context_id)
        asked: list[Any] = [
            lambda: optimizer.accumulate(context_id),
            lambda: optimizer.step(context_id),
            lambda: optimizer.clip_grad_norm_(context_id, 1.0),
            lambda: optimizer.clip_grad_value_(context_id, 1.0),
        ]
        for ask in asked:
            with pytest.raises(OptimizerError, match="would count twice"):
                ask()
        optimizer.step()
        optimizer.accumulate(context_id)
        optimizer.zero_grad()
    torch.testing.assert_close(dict(spread.state_dict()), stepped_once(batch))


def test_a_context_that_is_accumulated_twice_at_once_counts_once() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    (batch,) = batches(1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batch)])
        refused: list[OptimizerError] = []

        def accumulate() -> None:
            try:
                optimizer.accumulate(context_id)
            except OptimizerError as error:
                refused.append(error)

        threads = [threading.Thread(target=accumulate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(refused) == 3
        # As if one worker had not answered in time, and it were tried again.
        optimizer._accumulated.clear()
        optimizer.accumulate(context_id)
        optimizer.step()
    torch.testing.assert_close(dict(spread.state_dict()), stepped_once(batch))


def test_what_was_to_be_clipped_by_itself_is_not_stepped_unclipped() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        optimizer.accumulate(context_id)
    optimizer.clip_grad_norm_(None, 0.1)
    with autograd.context() as context_id:
        with pytest.raises(OptimizerError, match="under the context None"):
            optimizer.step(context_id)
        optimizer.step()
        optimizer.step(context_id)


def test_a_step_without_a_context_says_what_is_missing() -> None:
    spread = Spread()
    optimizer = DistributedOptimizer(optim.SGD, spread, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batches(1)[0])])
        with pytest.raises(OptimizerError, match="give it the id of the context"):
            optimizer.step()
