"""Stages on several workers that work at the same time, on different parts of one batch.

A batch is cut into micro-batches. Activations and gradients go from stage to stage directly; the
caller sends inputs to the first stage and targets to the last, where the loss is computed.

Two schedules differ in when backward begins, and so in how many activations a stage must keep:

- GPipe: all micro-batches forward, then one backward pass over all of them. A stage keeps the
  activations of every micro-batch.
- 1F1B: each micro-batch turns around at the last stage, and a new one enters only when one has
  left. With s stages at most s are under way, so a stage keeps at most s activations, however many
  micro-batches there are. Each micro-batch is a backward pass of its own in the same context; the
  gradients of all passes add up.

Either way the gradients are in the caller's autograd context on each stage's worker, and equal
those of the whole batch in one process: the loss of a micro-batch counts by its share of the batch.
What a module computes over its batch (batch normalization) it computes over the micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from telegrad import autograd
from telegrad.autograd import AutogradError
from telegrad.nn.ambient import Ambient, ambient, under
from telegrad.nn.lazy import Lazy, lazily
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.stage import HostedStage, Turn, make_stage
from telegrad.rpc import RRef, rpc_async, rpc_sync

Loss = Callable[[Any, Any], Tensor]


class Schedule(Enum):
    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"


class Reduction(Enum):
    """How the loss is made of its elements: says how micro-batches add up."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the first stage is called with."""

    x: Any
    kwargs: dict[str, Any]


class Pipeline(nn.Module):
    """RemoteModules one after the other, with several micro-batches under way.

        pipeline = Pipeline([first, middle, last], micro_batches=8, schedule="1f1b")
        with telegrad.autograd.context() as context_id:
            loss = pipeline.forward_backward(context_id, x, y, nn.functional.cross_entropy)
            optimizer.step(context_id)

    Called as a module it gives the output of the whole batch, differentiable like any other: that
    is GPipe, with the loss at the caller. `timeout` bounds each micro-batch in seconds; 0 for none.
    """

    def __init__(
        self,
        stages: Sequence[RemoteModule],
        micro_batches: int,
        schedule: str = "1f1b",
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if not stages or not all(isinstance(stage, RemoteModule) for stage in stages):
            raise TypeError("A pipeline needs one or more stages, each of them a RemoteModule.")
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: a batch is at least one micro-batch.")
        self.stages = nn.ModuleList(stages)
        self.micro_batches = micro_batches
        self.schedule = Schedule(schedule)
        self.timeout = timeout
        self._hosted: list[RRef[HostedStage]] = [
            rpc_sync(stage.owner, make_stage, (stage.rref,)) for stage in stages
        ]
        self._runs = itertools.count()

    @property
    def owners(self) -> list[str]:
        """The worker of each stage."""
        return [hosted.owner_name() for hosted in self._hosted]

    def forward(self, x: Any, **kwargs: Any) -> Any:
        """The output of the last stage for the whole batch, here. Keywords go to the first stage.

        Tensors of the input, in containers too, are cut along their first dimension; what else
        there is goes to every micro-batch as it is.
        """
        run = next(self._runs)
        inputs = self._inputs(x, kwargs)
        outputs = [self._send(Turn(run, number), part) for number, part in enumerate(inputs)]
        return join([output.to_here(self.timeout) for output in outputs])

    def forward_backward(
        self,
        context_id: int,
        x: Any,
        target: Any,
        loss: Loss,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> Tensor:
        """Forward and backward of one batch; returns the loss of the whole batch.

        `loss(output, target)` runs on the worker of the last stage, so it must have a name to
        travel by. `reduction` says whether it is a mean over the batch or a sum. Other keywords go
        to the first stage.
        """
        _check_context(context_id)
        if batch_size(target) != batch_size(x):
            raise ValueError(
                f"A batch of {batch_size(x)} has targets for {batch_size(target)}: both are cut "
                "into micro-batches along their first dimension."
            )
        inputs = self._inputs(x, kwargs)
        targets = split(target, len(inputs))
        weights = _weights([batch_size(part.x) for part in inputs], Reduction(reduction))
        if self.schedule is Schedule.GPIPE:
            losses = self._all_then_back(context_id, inputs, targets, loss, weights)
        else:
            losses = self._one_by_one(context_id, inputs, targets, loss, weights)
        return torch.stack(losses).sum()

    def _all_then_back(
        self,
        context_id: int,
        inputs: list[MicroBatch],
        targets: list[Any],
        loss: Loss,
        weights: list[float],
    ) -> list[Tensor]:
        run = next(self._runs)
        outputs = [self._send(Turn(run, i), part) for i, part in enumerate(inputs)]
        call = (outputs, targets, loss, weights, context_id)
        return self._at_the_end(call).wait()  # type: ignore[no-any-return]

    def _one_by_one(
        self,
        context_id: int,
        inputs: list[MicroBatch],
        targets: list[Any],
        loss: Loss,
        weights: list[float],
    ) -> list[Tensor]:
        run, under_way = next(self._runs), len(self._hosted)
        futures: list[Any] = []
        for number, part in enumerate(inputs):
            if number >= under_way:
                futures[number - under_way].wait()
            output = self._send(Turn(run, number), part)
            call = ([output], [targets[number]], loss, [weights[number]], context_id)
            futures.append(self._at_the_end(call))
        return [future.wait()[0] for future in futures]

    def _send(self, turn: Turn, part: MicroBatch) -> Lazy[Any]:
        """Let a micro-batch pass through all stages; the output stays at the last."""
        around = ambient()
        first, *others = self._hosted
        value = lazily(first, self.timeout, (turn, around, (part.x,), part.kwargs))
        for hosted in others:
            value = lazily(hosted, self.timeout, (turn, around, (value,), {}))
        return value

    def _at_the_end(self, call: tuple[Any, ...]) -> Any:
        worker = self._hosted[-1].owner()
        return rpc_async(worker, turn_around, (*call, ambient()), timeout=self.timeout)

    def _inputs(self, x: Any, kwargs: dict[str, Any]) -> list[MicroBatch]:
        parts = min(self.micro_batches, batch_size(x) or 1)
        return list(map(MicroBatch, split(x, parts), split(kwargs, parts)))


def turn_around(
    outputs: list[Lazy[Any]],
    targets: list[Any],
    loss: Loss,
    weights: list[float],
    context_id: int,
    around: Ambient | None,
) -> list[Tensor]:
    """On the worker of the last stage: the losses of micro-batches, and backward from them."""
    losses = []
    for output, target, weight in zip(outputs, targets, weights, strict=True):
        value = output.to_here()
        with under(around):
            losses.append(loss(value, target) * weight)
    autograd.backward(context_id, losses)
    return [each.detach() for each in losses]


def batch_size(value: Any) -> int:
    """The length of the first dimension of the first tensor in a value."""
    if isinstance(value, Tensor):
        return len(value)
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(items, list | tuple) else list(items):
        if isinstance(item, Tensor | list | tuple | dict):
            return batch_size(item)
    raise TypeError("The batch holds no tensor that could be cut into micro-batches.")


def split(value: Any, parts: int) -> list[Any]:
    """The micro-batches of a batch: each tensor cut along its first dimension."""
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, parts))
    if isinstance(value, list | tuple):
        columns = [split(item, parts) for item in value]
        return [type(value)(row) for row in zip(*columns, strict=True)]
    if isinstance(value, dict):
        cut = {key: split(item, parts) for key, item in value.items()}
        return [{key: rows[part] for key, rows in cut.items()} for part in range(parts)]
    return [value] * parts


def join(parts: list[Any]) -> Any:
    """The inverse of `split`, for outputs."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, list | tuple):
        return type(first)(join(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    raise TypeError(f"The last stage gave a {type(first).__name__}, which cannot be put together.")


def _weights(sizes: list[int], reduction: Reduction) -> list[float]:
    if reduction is Reduction.SUM:
        return [1.0] * len(sizes)
    return [size / sum(sizes) for size in sizes]


def _check_context(context_id: int) -> None:
    current = autograd.require_context().id
    if current != context_id:
        raise AutogradError(
            f"forward_backward was given the context {context_id}, but this thread works in "
            f"{current}: pass the id that `with telegrad.autograd.context()` gave."
        )
