"""One owner's part of a distributed optimizer: a plain torch optimizer over what lives there.

Gradients come from an autograd context, or from what `accumulate` added up before. They are put
into `.grad` for the moment of the step only, and what was there is put back: a step neither uses
nor changes the gradients that code of the owner keeps in `.grad`.

Several optimizers, of several trainers, may own parts that share parameters. All steps on one
worker exclude each other, and the passes that use `.grad` for a moment as well: a parameter never
sees half of two updates, and `.grad` never the gradient of another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from telegrad.autograd.api import autograd_of
from telegrad.autograd.leaves import add, grad_slots
from telegrad.optim.errors import OptimizerError
from telegrad.optim.treatment import Treatment, all_finite, norms, treat
from telegrad.rpc import RRef, get_worker_info

Options = dict[str, Any]
MakeOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of the job's optimizer: its place among all, and its name in errors."""

    index: int
    name: str
    rref: RRef[Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """The part of one parameter group that lives on one owner."""

    index: int
    members: tuple[Member, ...]
    options: Options


@dataclass(frozen=True, slots=True)
class Undo:
    """All that a step may change, as it was."""

    parameters: list[Tensor]
    state: dict[str, Any]


class OwnedOptimizer:
    """The optimizer of the parameters that one worker owns."""

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        groups: Sequence[Group],
        args: tuple[Any, ...],
        kwargs: Options,
    ) -> None:
        self._worker = get_worker_info().name
        self._members: list[Member] = []
        self._parameters: list[Tensor] = []
        self._groups: list[int] = []
        self._accumulated: dict[int, Tensor] = {}  # by place in _parameters
        self._undo: Undo | None = None
        local = [self._join(group) for group in groups]
        self._optimizer = make_optimizer(local, *args, **kwargs)

    def _join(self, group: Group) -> Options:
        parameters = [self._parameter_of(member) for member in group.members]
        self._members.extend(group.members)
        self._parameters.extend(parameters)
        self._groups.append(group.index)
        return {**group.options, "params": parameters}

    def _parameter_of(self, member: Member) -> Tensor:
        value = member.rref.local_value()
        if not isinstance(value, Tensor):
            raise OptimizerError(
                f"Parameter {member.name!r} on worker {self._worker!r} is a "
                f"{type(value).__name__}, not a tensor."
            )
        if not value.is_leaf:
            raise OptimizerError(
                f"Parameter {member.name!r} on worker {self._worker!r} is not a leaf tensor but "
                "the result of a computation: optimize what it was computed from."
            )
        return value

    def add_group(self, group: Group) -> dict[int, Options]:
        self._optimizer.add_param_group(self._join(group))
        return self.options()

    def options(self) -> dict[int, Options]:
        """What the optimizer made of the options of each group."""
        return {
            index: {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for index, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        }

    def defaults(self) -> Options:
        return self._optimizer.defaults

    # Gradients.

    def accumulate(self, context_id: int) -> None:
        with grad_slots:
            for place, gradient in self._of_context(context_id).items():
                self._accumulated[place] = add(self._accumulated.get(place), gradient)

    def zero_grad(self) -> None:
        self._accumulated.clear()

    def norms(
        self, context_id: int | None, treatments: Sequence[Treatment], norm_type: float
    ) -> dict[int, Tensor]:
        """The norm of each gradient, by the index of its parameter."""
        gradients = self._gradients(context_id, treatments)
        found = norms(gradients.values(), norm_type)
        return {self._members[p].index: norm for p, norm in zip(gradients, found, strict=True)}

    def all_finite(self, context_id: int | None, treatments: Sequence[Treatment]) -> bool:
        return all_finite(self._gradients(context_id, treatments).values())

    def _gradients(
        self, context_id: int | None, treatments: Sequence[Treatment]
    ) -> dict[int, Tensor]:
        """The gradient of each parameter that has one, by its place here."""
        total = {} if context_id is None else self._of_context(context_id)
        for place, gradient in self._accumulated.items():
            total[place] = add(gradient, total[place]) if place in total else gradient
        return dict(zip(total, treat(total.values(), treatments), strict=True))

    def _of_context(self, context_id: int) -> dict[int, Tensor]:
        context = autograd_of().container.find(context_id)
        if context is None:
            # This worker took no part in it; that the context exists at all is the driver's to say.
            return {}
        found = context.gradients()
        gradients = {place: found.get(p) for place, p in enumerate(self._parameters)}
        return {place: g.detach() for place, g in gradients.items() if g is not None}

    # Stepping.

    def step(
        self,
        context_id: int | None,
        treatments: Sequence[Treatment],
        options: Mapping[int, Options],
        keep_undo: bool,
    ) -> None:
        """Apply the gradients; those that were accumulated are used up."""
        with grad_slots:
            self.set_options(options)
            gradients = self._gradients(context_id, treatments)
            undo = self._snapshot() if keep_undo else None
            aside = [parameter.grad for parameter in self._parameters]
            try:
                self._put(gradients)
                self._optimizer.step()
            except Exception as error:
                if undo is not None:
                    self._restore(undo)
                raise self._explained(error, gradients) from error
            finally:
                for parameter, gradient in zip(self._parameters, aside, strict=True):
                    parameter.grad = gradient
            self._undo = undo
            self._accumulated.clear()

    def _put(self, gradients: Mapping[int, Tensor]) -> None:
        for place, parameter in enumerate(self._parameters):
            try:
                parameter.grad = gradients.get(place)
            except RuntimeError as error:
                raise OptimizerError(
                    f"the gradient of parameter {self._members[place].name!r} does not fit: {error}"
                ) from error

    def _explained(self, error: Exception, gradients: Mapping[int, Tensor]) -> OptimizerError:
        sparse = [place for place, gradient in gradients.items() if gradient.is_sparse]
        suspects = sparse if sparse and "sparse" in str(error) else list(gradients)
        names = ", ".join(repr(self._members[place].name) for place in suspects[:5])
        more = f" and {len(suspects) - 5} more" if len(suspects) > 5 else ""
        return OptimizerError(
            f"{type(self._optimizer).__name__} on worker {self._worker!r} failed with "
            f"{type(error).__name__}: {error} (parameter {names}{more})"
        )

    def set_options(self, options: Mapping[int, Options]) -> None:
        for index, changed in options.items():
            self._optimizer.param_groups[self._groups.index(index)].update(changed)

    # Undoing.

    def _snapshot(self) -> Undo:
        parameters = [parameter.detach().clone() for parameter in self._parameters]
        return Undo(parameters, copy.deepcopy(self._optimizer.state_dict()))

    def _restore(self, undo: Undo) -> None:
        with torch.no_grad():
            for parameter, before in zip(self._parameters, undo.parameters, strict=True):
                parameter.copy_(before)
        self._optimizer.load_state_dict(undo.state)

    def undo(self) -> None:
        """Take the last step back: another worker could not make it."""
        with grad_slots:
            if self._undo is not None:
                self._restore(self._undo)
                self._undo = None

    def forget_undo(self) -> None:
        self._undo = None

    # State.

    def state(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state of each parameter that has any, by the parameter's index."""
        with grad_slots:
            state = self._optimizer.state_dict()["state"]
        return {self._members[place].index: kept for place, kept in state.items()}

    def load_state(
        self, state: Mapping[int, dict[str, Any]], options: Mapping[int, Options]
    ) -> None:
        """Take over state and options; torch casts them to the parameters' dtype and device."""
        with grad_slots:
            packed = self._optimizer.state_dict()
            packed["state"] = {
                place: state[member.index]
                for place, member in enumerate(self._members)
                if member.index in state
            }
            for place, index in enumerate(self._groups):
                packed["param_groups"][place].update(options.get(index, {}))
            self._optimizer.load_state_dict(packed)
            self._accumulated.clear()
            self._undo = None

    def named_parameters(self) -> list[tuple[Member, Tensor]]:
        return list(zip(self._members, self._parameters, strict=True))


@dataclass(frozen=True, slots=True)
class Founded:
    """A part that was made: a reference to it, and what torch made of its options."""

    part: RRef[OwnedOptimizer]
    options: dict[int, Options]
    defaults: Options


def found_part(
    make_optimizer: MakeOptimizer,
    groups: Sequence[Group],
    args: tuple[Any, ...],
    kwargs: Options,
) -> Founded:
    """On the owner: make its part of the optimizer."""
    part = OwnedOptimizer(make_optimizer, groups, args, kwargs)
    return Founded(RRef(part), part.options(), part.defaults())
