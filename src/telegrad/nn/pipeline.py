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
those of the whole batch in one process: the loss of a micro-batch counts by its share of the rows.
What a module or a loss computes over its batch otherwise (batch normalization; a mean over those
targets that are not padding) it computes over the micro-batch.

What comes before the pipeline is run backward once: under 1F1B its graph is cut at the inputs, and
the gradients of all micro-batches go through it together in a pass of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from telegrad import autograd
from telegrad.autograd import AutogradError
from telegrad.nn.ambient import Ambient, ambient, under
from telegrad.nn.hosted import brought_to
from telegrad.nn.lazy import Lazy, lazily, like, with_each
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.stage import HostedStage, Turn, make_stage
from telegrad.rpc import RRef, rpc_async, rpc_sync
from telegrad.rpc.outside import outside_of_graphs, refuse_in_graph

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


@dataclass(frozen=True)
class _Goal:
    """What is wanted of micro-batches: their targets, the loss, and how much each counts in it."""

    targets: list[Any]
    loss: Loss
    weights: list[float]
    context_id: int

    def of(self, number: int) -> _Goal:
        """Of one of them."""
        return replace(self, targets=[self.targets[number]], weights=[self.weights[number]])


class Pipeline(nn.Module):
    """RemoteModules one after the other, with several micro-batches under way.

        pipeline = Pipeline([first, middle, last], micro_batches=8, schedule="1f1b")
        with telegrad.autograd.context() as context_id:
            loss = pipeline.forward_backward(context_id, x, y, nn.functional.cross_entropy)
            optimizer.step(context_id)

    Called as a module it gives the output of the whole batch, differentiable like any other: that
    is GPipe, with the loss at the caller. `timeout` bounds in seconds each call to a stage, with
    the time that it waits for its turn there: under GPipe that is all of the batch. 0 for none.
    """

    def __init__(
        self,
        stages: Sequence[RemoteModule],
        micro_batches: int,
        schedule: str = "1f1b",
        *,
        timeout: float | None = None,
    ) -> None:
        refuse_in_graph("Pipeline")
        super().__init__()
        if not stages or not all(isinstance(stage, RemoteModule) for stage in stages):
            raise TypeError("A pipeline needs one or more stages, each of them a RemoteModule.")
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(
                f"micro_batches={micro_batches!r}: a batch is cut into a number of micro-batches, "
                "at least one."
            )
        self.stages = nn.ModuleList(stages)
        self.micro_batches = micro_batches
        self.schedule = _one_of(Schedule, schedule)
        self.timeout = timeout
        self._made: list[RRef[HostedStage]] | None = None
        self._runs = itertools.count()
        assert len(self._hosted) == len(stages)  # A worker that is gone is told here.

    @property
    def owners(self) -> list[str]:
        """The worker of each stage."""
        return [hosted.owner_name() for hosted in self._hosted]

    @property
    def _hosted(self) -> list[RRef[HostedStage]]:
        if self._made is None:
            stages = [cast(RemoteModule, stage) for stage in self.stages]
            self._made = [rpc_sync(stage.owner, make_stage, (stage.rref,)) for stage in stages]
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        """A copy, here or on another worker, lets its own micro-batches take turns."""
        return {k: v for k, v in vars(self).items() if k not in ("_made", "_runs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_made": None, "_runs": itertools.count()})  # type: ignore[no-untyped-call]

    @outside_of_graphs
    def forward(self, x: Any, **kwargs: Any) -> Any:
        """The output of the last stage for the whole batch, here. Keywords go to the first stage.

        Tensors of the input, in containers too, are cut along their first dimension; what else
        there is goes to every micro-batch as it is.
        """
        run = next(self._runs)
        inputs = self._inputs(x, kwargs)
        outputs = [self._send(Turn(run, number), part) for number, part in enumerate(inputs)]
        return join([output.to_here(self.timeout) for output in outputs])

    @outside_of_graphs
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

        `loss(output, target)` runs on the worker of the last stage, where it is given targets on
        the device of the output; it must have a name to travel by. `reduction` says whether it is a
        mean over the rows of the batch or a sum. A mean over something else, such as the targets
        that are not padding, is a sum here, divided by what the caller has counted. Other keywords
        go to the first stage.

        If a micro-batch fails, the context may hold gradients of others: leave it.
        """
        _check_context(context_id)
        if batch_size(target) != batch_size(x):
            raise ValueError(
                f"A batch of {batch_size(x)} has targets for {batch_size(target)}: both are cut "
                "into micro-batches along their first dimension."
            )
        how = _one_of(Reduction, reduction)
        before = _Before()
        if self.schedule is Schedule.ONE_FORWARD_ONE_BACKWARD:
            x, target, kwargs = before.cut_off(x), before.cut_off(target), before.cut_off(kwargs)
        inputs = self._inputs(x, kwargs)
        _check_rows(target, batch_size(x), "The target")
        targets = split(target, len(inputs))
        weights = _weights([batch_size(part.x) for part in inputs], how)
        goal = _Goal(targets, loss, weights, context_id)
        if self.schedule is Schedule.GPIPE:
            losses = self._all_then_back(inputs, goal)
        else:
            losses = self._one_by_one(inputs, goal)
            before.run_backward(context_id)
        return torch.stack(losses).sum()

    def _all_then_back(self, inputs: list[MicroBatch], goal: _Goal) -> list[Tensor]:
        run = next(self._runs)
        outputs = [self._send(Turn(run, i), part) for i, part in enumerate(inputs)]
        return self._at_the_end(outputs, goal).wait()  # type: ignore[no-any-return]

    def _one_by_one(self, inputs: list[MicroBatch], goal: _Goal) -> list[Tensor]:
        run, under_way = next(self._runs), len(self._hosted)
        futures: list[Any] = []
        try:
            for number, part in enumerate(inputs):
                if number >= under_way:
                    futures[number - under_way].wait()
                output = self._send(Turn(run, number), part)
                futures.append(self._at_the_end([output], goal.of(number)))
            return [future.wait()[0] for future in futures]
        except Exception:
            # Whoever is told of a failure finds nothing under way any more.
            for future in futures:
                with suppress(Exception):
                    future.wait()
            raise

    def _send(self, turn: Turn, part: MicroBatch) -> Lazy[Any]:
        """Let a micro-batch pass through all stages; the output stays at the last."""
        around = ambient()
        first, *others = self._hosted
        value = lazily(first, self.timeout, "forward", (turn, around, (part.x,), part.kwargs))
        for hosted in others:
            value = lazily(hosted, self.timeout, "forward", (turn, around, (value,), {}))
        return value

    def _at_the_end(self, outputs: list[Lazy[Any]], goal: _Goal) -> Any:
        worker = self._hosted[-1].owner()
        call = (outputs, goal.targets, goal.loss, goal.weights, goal.context_id, ambient())
        return rpc_async(worker, turn_around, call, timeout=self.timeout)

    def _inputs(self, x: Any, kwargs: dict[str, Any]) -> list[MicroBatch]:
        rows = batch_size(x)
        _check_rows(x, rows, "The batch")
        for key, value in kwargs.items():
            _check_rows(value, rows, f"The keyword {key}")
        parts = min(self.micro_batches, rows or 1)
        return list(map(MicroBatch, split(x, parts), split(kwargs, parts)))


class _Before:
    """The graph behind the inputs of a pipeline, cut off from it."""

    def __init__(self) -> None:
        self._cuts: list[tuple[Tensor, Tensor]] = []

    def cut_off(self, value: Any) -> Any:
        """The value, with a leaf for each tensor that was computed from others."""
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                return value
            leaf = value.detach().requires_grad_()
            self._cuts.append((value, leaf))
            return leaf
        if isinstance(value, list | tuple | dict):
            return with_each(value, self.cut_off)
        return value

    def run_backward(self, context_id: int) -> None:
        """Let the gradients that the leaves have come to go on."""
        context = autograd.retrieve_context(context_id)
        found = context.take_gradients([leaf for _, leaf in self._cuts])
        roots = [
            _with_gradient(value, gradient)
            for (value, _), gradient in zip(self._cuts, found, strict=True)
            if gradient is not None
        ]
        if roots:
            autograd.backward(context_id, roots)


def _with_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """A root from which the value gets just that gradient."""
    return (value * gradient.conj()).real.sum() if value.is_complex() else (value * gradient).sum()


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
        if (tensor := next(_all_tensors(value), None)) is not None:
            target = brought_to(tensor.device, target)
        with under(around):
            found = loss(value, target)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"The loss of a pipeline is one tensor, but {loss!r} gave a {type(found).__name__}."
            )
        losses.append(found * weight)
    autograd.backward(context_id, losses)
    return [each.detach() for each in losses]


def batch_size(value: Any) -> int:
    """The length of the first dimension of the tensors in a value."""
    for tensor in tensors_in(value):
        return len(tensor)
    raise TypeError(
        f"There is no tensor in a {type(value).__name__} that could be cut into micro-batches "
        "along its first dimension."
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that are cut: all but those without a dimension."""
    return (tensor for tensor in _all_tensors(value) if tensor.dim())


def _all_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_tensors(item)


def _check_rows(value: Any, rows: int, what: str) -> None:
    """A tensor of another length would be cut at other places than the batch."""
    for tensor in tensors_in(value):
        if len(tensor) != rows:
            raise ValueError(
                f"{what} has a tensor of the shape {tuple(tensor.shape)}, but there are {rows} "
                "rows to be cut into micro-batches along the first dimension. What all "
                "micro-batches share can be a buffer of the stage, or be expanded to all rows."
            )


def split(value: Any, parts: int) -> list[Any]:
    """The micro-batches of a batch: each tensor cut along its first dimension, if it has one."""
    if isinstance(value, Tensor) and value.dim():
        return list(torch.tensor_split(value, parts))
    if isinstance(value, list | tuple):
        columns = [split(item, parts) for item in value]
        rows = zip(*columns, strict=True) if columns else [()] * parts
        return [like(value, list(row)) for row in rows]
    if isinstance(value, dict):
        cut = {key: split(item, parts) for key, item in value.items()}
        return [like(value, {key: rows[i] for key, rows in cut.items()}) for i in range(parts)]
    return [value] * parts


def join(parts: list[Any]) -> Any:
    """The inverse of `split`, for outputs."""
    first = parts[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(parts)
    if isinstance(first, list | tuple):
        return like(first, [join(list(column)) for column in zip(*parts, strict=True)])
    if isinstance(first, dict):
        return like(first, {key: join([part[key] for part in parts]) for key in first})
    if all(part is None for part in parts):
        return None
    what = "tensor without a dimension" if isinstance(first, Tensor) else type(first).__name__
    raise TypeError(
        f"The last stage gave a {what} for each micro-batch, and there is no way to tell what it "
        "would be for the whole batch: give tensors with a row for each row of the batch."
    )


def _weights(sizes: list[int], reduction: Reduction) -> list[float]:
    if reduction is Reduction.SUM:
        return [1.0] * len(sizes)
    total = sum(sizes)
    return [size / total if total else 1.0 for size in sizes]  # The mean over nothing is NaN.


_Choice = TypeVar("_Choice", bound=Enum)


def _one_of(kind: type[_Choice], value: object) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        choices = " or ".join(repr(each.value) for each in kind)
        raise ValueError(f"{value!r} is no {kind.__name__.lower()}: give {choices}.") from None


def _check_context(context_id: int) -> None:
    current = autograd.require_context().id
    if current != context_id:
        raise AutogradError(
            f"forward_backward was given the context {context_id}, but this thread works in "
            f"{current}: pass the id that `with telegrad.autograd.context()` gave."
        )
