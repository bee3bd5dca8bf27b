"""One owner's part of a distributed optimizer: a plain torch optimizer over what lives there.

Gradients come from an autograd context, or from what `accumulate` added up before. They are put
into `.grad` for the moment of the step only, and what was there is put back: a step neither uses
nor changes the gradients that code of the owner keeps in `.grad`.

Several optimizers, of several trainers, may own parts that share parameters. All steps on one
worker exclude each other, and the passes that use `.grad` for a moment as well: a parameter never
sees half of two updates, and `.grad` never the gradient of another.

A step is asked for by a call, or follows a pass in which this worker took part (`follow`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from telegrad.autograd.api import autograd_of, require_context
from telegrad.autograd.context import Context
from telegrad.autograd.leaves import add, grad_slots
from telegrad.optim.errors import GroupRefused, OptimizerError
from telegrad.optim.options import Options, read_options, without_params
from telegrad.optim.torch_private import step_quietly
from telegrad.optim.treatment import Treatment, all_finite, norms, treat
from telegrad.rpc import RRef, get_worker_info

MakeOptimizer = Callable[..., Optimizer]
Gradients = list[Tensor | None]
"""One for each parameter of this owner, in their order."""
BRIEF = 0.0002
"""Seconds: about what a message takes."""
_grad_of = attrgetter("grad")
# Each parameter is gone through several times in a step: not by the interpreter.
_go_through: Callable[[Iterable[object]], None] = deque[object](maxlen=0).extend
_GRAD, _REQUIRES_GRAD, _FALSE = repeat("grad"), repeat("requires_grad"), repeat(False)


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

    number: int
    parameters: list[Tensor]
    state: dict[Any, Any]
    options: list[Options]
    accumulated: dict[int, Tensor]
    contexts: set[int]


class OwnedOptimizer:
    """The optimizer of the parameters that one worker owns."""

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        groups: Sequence[Group],
        args: tuple[Any, ...],
        kwargs: Options,
        key: int,
    ) -> None:
        """`key` names all parts of one optimizer: passes that it is to follow have it."""
        self._worker = get_worker_info().name
        self._members: list[Member] = []
        self._parameters: list[Tensor] = []
        self._groups: list[int] = []
        self._accumulated: dict[int, Tensor] = {}  # by place in _parameters
        self._contexts: set[int] = set()
        """Those that are in what was accumulated. None counts twice, whoever tries again."""
        self._undo: Undo | None = None
        self._undone = -1  # Steps up to this number are not to be made any more.
        found = [self._found(group) for group in groups]
        with self._refusals(groups):
            self._optimizer = make_optimizer([_torchs(*each) for each in found], *args, **kwargs)
        if _needs_closure(self._optimizer):
            raise OptimizerError(
                f"{type(self._optimizer).__name__} evaluates the model several times per step, in "
                "a closure that sees all parameters: it cannot be distributed."
            )
        for each in found:
            self._join(*each)
        autograd_of().sequels.add(key, self)
        self._duration = math.inf

    def _found(self, group: Group) -> tuple[Group, dict[Tensor, Member]]:
        """The parameters of a group, each once: modules that share one name it both, and nobody
        but its owner knows."""
        found: dict[Tensor, Member] = {}
        for member in group.members:
            found.setdefault(self._parameter_of(member), member)
        return group, found

    def _join(self, group: Group, found: dict[Tensor, Member]) -> None:
        self._members.extend(found.values())
        self._parameters.extend(found)
        self._groups.append(group.index)

    @contextlib.contextmanager
    def _refusals(self, groups: Sequence[Group]) -> Iterator[None]:
        """What torch refuses is told with the worker and the parameters that it is about."""
        try:
            yield
        except Exception as error:
            names = [member.name for group in groups for member in group.members]
            raise GroupRefused(
                f"The optimizer of worker {self._worker!r} cannot be made for the parameters "
                f"{_listed(names)}: {type(error).__name__}: {error}"
            ) from error

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
        found = self._found(group)
        with grad_slots, self._refusals([group]):
            self._optimizer.add_param_group(_torchs(*found))
        self._join(*found)
        return self.options()

    def drop_group(self, index: int) -> None:
        """Take the last group back: another worker could not add its part of it."""
        with grad_slots:
            place = self._groups.index(index)
            count = len(self._optimizer.param_groups.pop(place)["params"])
            del self._groups[place], self._members[-count:], self._parameters[-count:]

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
            if context_id not in self._contexts:
                self._contexts.add(context_id)
                for place, gradient in enumerate(self._of_context(_find(context_id))):
                    if gradient is not None:
                        self._accumulated[place] = add(self._accumulated.get(place), gradient)

    def zero_grad(self) -> None:
        self._accumulated.clear()
        self._contexts.clear()

    def norms(
        self, context_id: int | None, treatments: Sequence[Treatment], norm_type: float
    ) -> dict[int, Tensor]:
        """The norm of each gradient, by the index of its parameter."""
        there = _there(self._gradients(_find(context_id), treatments))
        found = norms(there.values(), norm_type)
        return {self._members[p].index: norm for p, norm in zip(there, found, strict=True)}

    def all_finite(self, context_id: int | None, treatments: Sequence[Treatment]) -> bool:
        return all_finite(_there(self._gradients(_find(context_id), treatments)).values())

    def _gradients(self, context: Context | None, treatments: Sequence[Treatment]) -> Gradients:
        total = self._of_context(context)
        for place, gradient in self._accumulated.items():
            found = total[place]
            total[place] = gradient if found is None else add(gradient, found)
        if treatments:
            there = _there(total)
            try:
                treated = treat(there.values(), treatments)
            except RuntimeError as error:
                raise self._explained(error, total) from error
            for place, gradient in zip(there, treated, strict=True):
                total[place] = gradient
        return total

    def _of_context(self, context: Context | None) -> Gradients:
        if context is None:
            return [None] * len(self._parameters)
        gradients = context.gradients_of(self._parameters)
        if True in map(getattr, gradients, _REQUIRES_GRAD, _FALSE):
            return [each if each is None else each.detach() for each in gradients]
        return gradients

    # Stepping.

    def step_here(self) -> None:
        """As `step` for the context of the call, without anything else: nearly all steps."""
        with grad_slots:
            self._apply(self._gradients(require_context(), ()))

    def step(
        self,
        context_id: int | None,
        treatments: Sequence[Treatment],
        options: Mapping[int, Options],
        number: int | None,
    ) -> None:
        """Apply the gradients; those that were accumulated are used up.

        A step that has a number can be undone by it.
        """
        with grad_slots:
            if number is not None and number <= self._undone:
                raise OptimizerError("this step was given up before it began")
            self.set_options(options)
            gradients = self._gradients(_find(context_id), treatments)
            self._apply(gradients, None if number is None else self._snapshot(number))

    def _apply(self, gradients: Gradients, undo: Undo | None = None) -> None:
        """Make a step with these in `.grad`, and put back what was there."""
        aside = list(map(_grad_of, self._parameters))
        try:
            self._put(gradients)
            step_quietly(self._optimizer)
        except Exception as error:
            if undo is not None:
                self._restore(undo)
            raise self._explained(error, gradients) from error
        finally:
            _go_through(map(setattr, self._parameters, _GRAD, aside))
        self._undo = undo
        if self._contexts:
            self.zero_grad()

    def follow(self, context: Context, data: bytes) -> None:
        """A pass is complete here (see `autograd.sequels`): step with what the context has."""
        started = time.perf_counter()
        with grad_slots:
            if data:
                options = read_options(data)
                self.set_options({i: options[i] for i in options if i in self._groups})
            self._apply(self._gradients(context, ()))
        self._duration = time.perf_counter() - started

    @property
    def brief(self) -> bool:
        return self._duration < BRIEF

    def _put(self, gradients: Gradients) -> None:
        try:
            _go_through(map(setattr, self._parameters, _GRAD, gradients))
        except RuntimeError as error:
            place = self._first_misfit(gradients)
            raise OptimizerError(
                f"the gradient of parameter {self._members[place].name!r} does not fit: {error}"
            ) from error

    def _first_misfit(self, gradients: Gradients) -> int:
        """The place of the first parameter that does not take its gradient."""
        place = 0
        with contextlib.suppress(RuntimeError):
            for place, parameter in enumerate(self._parameters):
                parameter.grad = gradients[place]
        return place

    def _explained(self, error: Exception, gradients: Gradients) -> OptimizerError:
        there = _there(gradients)
        sparse = [place for place, gradient in there.items() if gradient.is_sparse]
        suspects = sparse if sparse and "sparse" in str(error) else list(there)
        names = [self._members[place].name for place in suspects]
        about = f" (parameter {_listed(names)})" if names else ""
        return OptimizerError(
            f"{type(self._optimizer).__name__} on worker {self._worker!r} failed with "
            f"{type(error).__name__}: {error}{about}"
        )

    def set_options(self, options: Mapping[int, Options]) -> None:
        for index, changed in options.items():
            self._optimizer.param_groups[self._groups.index(index)].update(changed)

    # Undoing.

    def _snapshot(self, number: int) -> Undo:
        parameters = [parameter.detach().clone() for parameter in self._parameters]
        # State is kept by parameter, and these are not copied: they are what it is kept by.
        same: dict[int, Any] = {id(parameter): parameter for parameter in self._parameters}
        state = copy.deepcopy(dict(self._optimizer.state), same)
        groups = self._optimizer.param_groups
        options = [copy.deepcopy(without_params(group), same) for group in groups]
        accumulated, contexts = dict(self._accumulated), set(self._contexts)
        return Undo(number, parameters, state, options, accumulated, contexts)

    def _restore(self, undo: Undo) -> None:
        """Not by `load_state_dict`, which casts state to the dtype of its parameter."""
        with torch.no_grad():
            for parameter, before in zip(self._parameters, undo.parameters, strict=True):
                parameter.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(undo.state)
        for group, options in zip(self._optimizer.param_groups, undo.options, strict=True):
            for name in without_params(group).keys() - options.keys():
                del group[name]
            group.update(options)
        self._accumulated, self._contexts = dict(undo.accumulated), set(undo.contexts)

    def undo(self, number: int) -> None:
        """Take a step back that another worker could not make; refuse it if it has yet to come."""
        with grad_slots:
            if self._undo is not None and self._undo.number == number:
                self._restore(self._undo)
                self._undo = None
            self._undone = number

    def forget_undo(self, number: int) -> None:
        """All have made the step. The next one may be under way already."""
        with grad_slots:
            if self._undo is not None and self._undo.number == number:
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
            self.zero_grad()
            self._undo = None

    def named_parameters(self) -> list[tuple[Member, Tensor]]:
        return list(zip(self._members, self._parameters, strict=True))


def _find(context_id: int | None) -> Context | None:
    """None, too, if this worker took no part in that context; whether it exists at all is the
    driver's to say."""
    return None if context_id is None else autograd_of().container.find(context_id)


def _there(gradients: Gradients) -> dict[int, Tensor]:
    """Those that there are, by their places."""
    return {place: each for place, each in enumerate(gradients) if each is not None}


def _torchs(group: Group, found: Iterable[Tensor]) -> Options:
    """A group as torch takes it."""
    return {**group.options, "params": list(found)}


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


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
    key: int,
) -> Founded:
    """On the owner: make its part of the optimizer."""
    part = OwnedOptimizer(make_optimizer, groups, args, kwargs, key)
    return Founded(RRef(part), part.options(), part.defaults())
