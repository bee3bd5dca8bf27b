"""One optimizer over parameters that live on many workers.

The driver keeps the options of each parameter group (learning rate, betas, ...), because that is
where schedulers change them. Each owner of parameters keeps a plain torch optimizer over its own
(owned.py). A step is one round trip to all owners at once: it carries the context whose gradients
are to be applied, options that changed since the last step, and what is to be done to gradients on
the way (treatment.py).

Clipping by global norm needs one more round trip, in which the owners tell the norms of their
gradients; the factor travels with the step. The norms are added up in the order of the parameters,
one number per parameter, exactly as torch does in one process: the result is the same to the bit.

A step that fails on some worker leaves one of these states, and `StepFailed` says which:

- `atomic=True`: every live worker is where it was before the step, parameters and state. Owners
  keep a copy until all have stepped.
- otherwise: each worker in `stepped` made the whole step; each in `failed` may have updated some
  groups. The optimizer refuses further steps until a state is loaded.

A step can also be a part of the backward pass (`backward_and_step`): each owner makes it when its
own part of the pass is complete, and says so with the acknowledgement that the pass needs anyway.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from telegrad.autograd.api import autograd_of, backward, known_mode, run_pass
from telegrad.autograd.context import Context, current_context
from telegrad.autograd.messages import Mode, Sequel
from telegrad.autograd.messages import Options as PassOptions
from telegrad.optim.errors import OptimizerError, StepFailed
from telegrad.optim.options import (
    Options,
    changed_options,
    snapshot,
    without_params,
    write_options,
)
from telegrad.optim.owned import Group, Member, OwnedOptimizer
from telegrad.optim.parameters import references_of
from telegrad.optim.parts import Parts
from telegrad.optim.torch_private import (
    announced_if_anyone_listens,
    has_hooks_before_step,
    run_after_loading,
    run_after_saving,
    run_before_loading,
    run_before_saving,
)
from telegrad.optim.treatment import Clamp, Treatment, clipping
from telegrad.rpc import RRef, WorkerLost, get_worker_info
from telegrad.rpc.calls import afresh
from telegrad.rpc.outside import outside_of_graphs, refuse_in_graph


def _traced() -> Any:
    """What a step is for Dynamo: one node of a graph."""
    from telegrad.compile import traced

    return traced


class DistributedOptimizer(Optimizer):
    """Any `torch.optim` optimizer, over parameters of any workers.

        optimizer = DistributedOptimizer(torch.optim.Adam, [encoder, decoder], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        with telegrad.autograd.context() as context_id:
            telegrad.autograd.backward(context_id, [loss(decoder(encoder.lazy(x)), y)])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id)
        scheduler.step()

    `params` are tensors of this worker, RRefs, RemoteModules, modules that contain RemoteModules,
    (name, parameter) pairs, or parameter groups of these. Further arguments go to
    `optimizer_class`. Hooks of the step run on the driver.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params: Any,
        *args: Any,
        atomic: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_in_graph("DistributedOptimizer")
        self._parts = Parts(optimizer_class, args, kwargs)
        self._members: list[list[Member]] = []
        self._named: list[bool] = []
        self.changes: list[Tensor] = []
        """The parameters that live here: a compiled function has to know what a step changes."""
        self._sent: list[Options] = []
        self._treatments: dict[int | None, list[Treatment]] = {}
        self._accumulated: set[int] = set()
        """The contexts whose gradients wait for the next step."""
        self._accumulating = threading.Lock()
        self._failure: StepFailed | None = None
        self._atomic = atomic
        self._here = get_worker_info().name
        self._numbers = itertools.count()
        self._usual_passes: dict[Mode, PassOptions] = {}
        """What is said in a pass that makes a step, if no option has changed."""
        super().__init__(_as_groups(params), {})
        self._found_parts()

    # Parameters.

    @outside_of_graphs
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters may live on workers that had none before."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(
                f"A parameter group is a dict with a key 'params', not {param_group!r:.100}."
            )
        options = dict(param_group)
        references = references_of(options.pop("params"))
        if not references:
            raise ValueError("optimizer got an empty parameter list")
        first = sum(map(len, self._members))
        taken = {member.name for members in self._members for member in members}
        group = []
        for index, (name, rref) in enumerate(references, first):
            unique = name if name and name not in taken else f"{name or ''} parameter {index}"
            taken.add(unique)
            group.append(Member(index, unique.strip(), rref))
        made = self._extend(len(self._members), group, options) if self._parts.by_owner else {}
        self._members.append(group)
        self.changes += [m.rref.local_value() for m in group if m.rref.is_owner()]
        self._named.append(all(name for name, _ in references))
        self.param_groups.append({"params": [member.rref for member in group], **options})
        self._adopt(made)

    def _found_parts(self) -> None:
        groups: dict[str, list[Group]] = {}
        for index, members in enumerate(self._members):
            options = without_params(self.param_groups[index])
            for owner, group in _by_owner(index, members, options).items():
                groups.setdefault(owner, []).append(group)
        made = self._parts.found(groups)
        self.defaults = next(iter(made.values())).defaults
        for founded in made.values():
            self._adopt(founded.options)

    def _extend(self, index: int, members: list[Member], options: Options) -> dict[int, Options]:
        """Have every owner of its parameters add a group, or none; what torch made of its options.

        An owner that could not leaves the optimizer as it was.
        """
        groups = _by_owner(index, members, options)
        added, failed = self._parts.attempt(
            "add_group",
            {owner: (group,) for owner, group in groups.items() if owner in self._parts.by_owner},
        )
        try:
            for error in failed.values():
                raise error
            new = {owner: [group] for owner, group in groups.items() if owner not in added}
            made = [
                *added.values(),
                *(founded.options for founded in self._parts.found(new).values()),
            ]
        except BaseException:
            self._parts.attempt("drop_group", dict.fromkeys(added, (index,)))
            raise
        return {index: made[0][index]}

    def _adopt(self, options: Mapping[int, Options]) -> None:
        """Take over what torch made of the options on an owner. Of other groups it says nothing:
        what changed in them is still to be told."""
        self._sent += [{} for _ in self.param_groups[len(self._sent) :]]
        for index, known in options.items():
            self.param_groups[index].update(known)
            self._sent[index] = snapshot(self.param_groups[index])

    # Gradients.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that `accumulate` added up.

        Gradients of a context end with the context, so without `accumulate` there is nothing to
        clear. `.grad` is neither used nor changed.
        """
        _refuse_in_graph("zero_grad")
        self._treatments.pop(None, None)
        self._accumulated.clear()
        self._parts.on_all("zero_grad")

    def give_up(self, context_id: int | None) -> None:
        """Do not step with the gradients of a context, nor with what was accumulated."""
        self._treatments.pop(context_id, None)
        self.zero_grad()

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to those that the next step will apply.

        Call it inside of each context, then `step()`; or inside of each but the last, and there
        `step(context_id)`. To clip what was accumulated, clip the context `None`.
        """
        if is_dynamo_compiling():
            _traced().perform(self, "accumulate", context_id, [])
            return
        with self._accumulating:
            self._check_context(context_id)
            self._accumulated.add(context_id)
        try:
            self._parts.on_all("accumulate", context_id)
        except BaseException:
            # Those that have added it know that they have: it can be tried again.
            self._accumulated.discard(context_id)
            raise

    def _check_context(self, context_id: int | None) -> Context | None:
        """The context, if there is such a one and its gradients would not count twice."""
        if context_id is None:
            return None
        context = autograd_of().context(context_id)
        if context_id in self._accumulated:
            raise OptimizerError(
                f"The gradients of context {context_id} have been accumulated and would count "
                "twice: step() applies what was accumulated, without the context's id, and "
                "clip_grad_norm_(None, ...) clips it."
            )
        return context

    def clip_grad_norm_(
        self,
        context_id: int | None,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the gradients of the next step by their norm over all workers, and return it.

        As `torch.nn.utils.clip_grad_norm_`, in one round trip. The gradients in the context stay
        as they are: clipping takes place in `step(context_id)`.
        """
        _refuse_in_graph("clip_grad_norm_")
        self._check_context(context_id)
        norm_type = float(norm_type)
        asked = (context_id, self.treatments(context_id), norm_type)
        answers = self._parts.on_all("norms", *asked)
        by_index = {i: norm for answer in answers.values() for i, norm in answer.items()}
        norms = [by_index[index] for index in sorted(by_index)]
        total = (
            torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        )
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be "
                f"clipped; it is largest for parameter {self._name(_worst(by_index))}."
            )
        self.treat(context_id, clipping(total, max_norm))
        return total

    def clip_grad_value_(self, context_id: int | None, clip_value: float) -> None:
        """Clip each element of the gradients of the next step; costs no round trip."""
        _refuse_in_graph("clip_grad_value_")
        self.treat(context_id, Clamp(float(clip_value)))

    def all_finite(self, context_id: int | None) -> bool:
        """Whether no gradient on any worker has an infinity or a NaN."""
        _refuse_in_graph("all_finite")
        self._check_context(context_id)
        asked = (context_id, self.treatments(context_id))
        return all(self._parts.on_all("all_finite", *asked).values())

    @outside_of_graphs
    def treat(self, context_id: int | None, treatment: Treatment) -> None:
        """Have something done to the gradients of the next step."""
        self._check_context(context_id)
        if context_id not in self._treatments:
            self._forget_ended_contexts()
        self._treatments.setdefault(context_id, []).append(treatment)

    def treatments(self, context_id: int | None) -> Sequence[Treatment]:
        """What is to be done to the gradients of the next step."""
        return tuple(self._treatments.get(context_id, ()))

    def _forget_ended_contexts(self) -> None:
        """Whoever clips does not always step."""
        live = autograd_of().container
        ended = [i for i in self._treatments if i is not None and live.find(i) is None]
        for context_id in ended:
            del self._treatments[context_id]

    def _name(self, index: int) -> str:
        member = next(m for group in self._members for m in group if m.index == index)
        return f"{member.name!r} on worker {member.rref.owner_name()!r}"

    # Stepping.

    @announced_if_anyone_listens
    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Apply the gradients of a context, and those that were accumulated, on all owners at once.

        Parameters without a gradient are left alone, as in torch. Returns when all have stepped.
        Without a context, and with nothing accumulated, there is nothing that it could apply: that
        is refused.
        """
        self._step(context_id)

    def backward_and_step(
        self,
        context_id: int,
        roots: Sequence[Tensor],
        mode: str = "smart",
        timeout: float | None = None,
    ) -> None:
        """`telegrad.autograd.backward(context_id, roots)` and `step(context_id)` in one.

            with telegrad.autograd.context() as context_id:
                optimizer.backward_and_step(context_id, [loss(model(x), y)])

        The same gradients and the same step, without the step's own round trip: each worker steps
        as soon as its part of the backward pass is done, while others are still at theirs. Returns
        when all have stepped.

        If the pass fails, some workers may have stepped: `StepFailed` says so, and the optimizer
        refuses further steps until a state is loaded. With `atomic=True`, where gradients were
        accumulated or are to be clipped, with hooks before the step, and if it is not the first
        pass of its context, the step comes after the pass, as if called by itself.
        """
        if not is_dynamo_compiling():
            context = self._check_context(context_id)
            self._refuse_after_failure()
            if context is not None and not self._steps_apart(context):
                changed = changed_options(self.param_groups, self._sent)
                options = self._of_pass(known_mode(mode), changed)
                if options is not None:
                    self._step_in_pass(context_id, roots, options, timeout)
                    return
        backward(context_id, roots, mode=mode, timeout=timeout)
        self.step(context_id)

    def _steps_apart(self, context: Context) -> bool:
        """Whether a step has to wait for the whole pass, or concerns workers without a part in it:
        those may have gradients of earlier passes."""
        treatments = self._treatments
        return bool(
            self._atomic
            or self._accumulated
            or (treatments and (treatments.get(context.id) or treatments.get(None)))
            or has_hooks_before_step(self)
            or context.passes.known()
        )

    def _of_pass(self, mode: Mode, changed: Mapping[int, Options]) -> PassOptions | None:
        """What a pass has to say that makes the step; None if that is too much for one."""
        if not changed:
            usual = self._usual_passes.get(mode)
            if usual is None:
                usual = PassOptions(mode=mode, sequel=Sequel(self._parts.key))
                self._usual_passes[mode] = usual
            return usual
        data = write_options(changed)
        if data is None:
            return None
        self._leave_unsettled(changed)
        return PassOptions(mode=mode, sequel=Sequel(self._parts.key, data))

    def _leave_unsettled(self, changed: Mapping[int, Options]) -> None:
        """Owners that take no part in a pass do not hear of changed options. So these are told
        again and again, also if they change back, until a step of its own tells everyone."""
        for index, options in changed.items():
            for name in options:
                self._sent[index].pop(name, None)

    @announced_if_anyone_listens
    def _step_in_pass(
        self,
        context_id: int,
        roots: Sequence[Tensor],
        options: PassOptions,
        timeout: float | None,
    ) -> None:
        begun: list[bool] = []
        try:
            run_pass(context_id, roots, options, timeout, partial(begun.append, True))
        except BaseException as error:
            if begun:
                self._fail_in_pass(error)
            raise
        self._opt_called = True

    def _fail_in_pass(self, error: BaseException) -> None:
        """Nobody knows who has stepped and who has not."""
        worker = getattr(error, "worker", "") or self._here
        # What is kept must not be raised: its frames know the graph.
        self._failure = StepFailed({worker: afresh(error)}, None, undone=False)
        if isinstance(error, Exception):
            raise StepFailed({worker: error}, None, undone=False) from error

    def _step(self, context_id: int | None) -> None:
        if is_dynamo_compiling():
            _traced().perform(self, "step", context_id, list(self.changes))
            return
        if callable(context_id):
            raise TypeError(
                "step() takes a context id, not a closure: optimizers that evaluate the model "
                "several times per step cannot be distributed."
            )
        self._opt_called = True  # Schedulers of torch ask for it.
        context = self._check_context(context_id)
        self._refuse_after_failure()
        changed = changed_options(self.param_groups, self._sent)
        if not (self._accumulated or self._treatments or self._atomic or changed) and (
            context is not None and context is current_context()
        ):
            # As nearly always: calls of this thread carry the context by themselves.
            stepped, failed = self._parts.attempt(
                "step_here", dict.fromkeys(self._parts.by_owner, ())
            )
            if failed:
                self._fail(failed, tuple(stepped))
            return
        used = set(self._accumulated)
        if context_id is not None and self._treatments.get(None):
            raise OptimizerError(
                "What was accumulated was to be clipped or unscaled by itself, under the context "
                "None: accumulate this context as well, and step() without its id; or clip and "
                "unscale under the id with which you step."
            )
        if context_id is None and not used:
            raise OptimizerError(
                "step() has nothing to apply: gradients are kept by context, so give it the id of "
                "the context in which backward ran, or accumulate() some before."
            )
        treatments = tuple(self._treatments.pop(context_id, ()))
        number = next(self._numbers) if self._atomic else None
        calls = {
            owner: (context_id, treatments, self._of_owner(changed, owner), number)
            for owner in self._parts.by_owner
        }
        stepped, failed = self._parts.attempt("step", calls)
        if number is None:
            if failed:
                self._fail(failed, tuple(stepped))
        elif failed:
            self._treatments.setdefault(context_id, []).extend(treatments)
            self._undo(number, failed)
        else:
            self._parts.keep(number)
        self._accumulated -= used
        for index, options in changed.items():
            self._sent[index].update(snapshot(options))

    def _of_owner(self, options: Mapping[int, Options], owner: str) -> dict[int, Options]:
        """The options of the groups in which a worker has parameters."""
        return {
            index: known
            for index, known in options.items()
            if any(member.rref.owner_name() == owner for member in self._members[index])
        }

    def _undo(self, number: int, failed: dict[str, BaseException]) -> NoReturn:
        """Have all live owners take a step back.

        Also those that failed: who did not answer in time may have made it, or may yet be about to.
        """
        live = [
            owner for owner in self._parts.by_owner if not isinstance(failed.get(owner), WorkerLost)
        ]
        _, unanswered = self._parts.attempt("undo", dict.fromkeys(live, (number,)))
        failed = {**unanswered, **failed}
        if not all(isinstance(error, WorkerLost) for error in unanswered.values()):
            self._fail(failed, ())
        raise StepFailed(failed, (), undone=True) from next(iter(failed.values()))

    def _fail(self, failed: Mapping[str, BaseException], stepped: tuple[str, ...]) -> NoReturn:
        self._failure = StepFailed(failed, stepped, undone=False)
        raise self._failure from next(iter(failed.values()))

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise OptimizerError(
                "An earlier step was made on some workers only, so their parameters do not belong "
                "together: load a checkpoint or a state_dict before the next step."
            ) from self._failure

    # State.

    @outside_of_graphs
    def state_dict(self) -> dict[str, Any]:
        """The state of all owners, as the same optimizer in one process would give it."""
        run_before_saving(self)
        state = {
            i: kept for part in self._parts.on_all("state").values() for i, kept in part.items()
        }
        groups = []
        for group, members, named in zip(
            self.param_groups, self._members, self._named, strict=True
        ):
            packed = {**without_params(group), "params": [member.index for member in members]}
            if named:
                packed["param_names"] = [member.name for member in members]
            groups.append(packed)
        packed_state = {index: state[index] for index in sorted(state)}
        return run_after_saving(self, {"state": packed_state, "param_groups": groups})

    @outside_of_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this optimizer, or one in a single process, has given."""
        state_dict = run_before_loading(self, state_dict)
        groups = copy.deepcopy(state_dict["param_groups"])
        sizes, own_sizes = [len(g["params"]) for g in groups], [len(m) for m in self._members]
        if sizes != own_sizes:
            raise ValueError(
                f"The state has groups of {sizes} parameters, but this optimizer of {own_sizes}."
            )
        numbers = [number for group in groups for number in group["params"]]
        state = {
            i: state_dict["state"][n] for i, n in enumerate(numbers) if n in state_dict["state"]
        }
        self._load(state, {index: without_params(group) for index, group in enumerate(groups)})
        run_after_loading(self)

    def _load(self, state: Mapping[int, Any], options: Mapping[int, Options]) -> None:
        calls = {
            owner: (self._state_of(state, owner), self._of_owner(options, owner))
            for owner in self._parts.by_owner
        }
        here = get_worker_info().name
        if here in calls:  # What travels is a copy; what stays would be shared with the given one.
            calls[here] = copy.deepcopy(calls[here])
        self._parts.on_owners("load_state", calls)
        self._adopt(options)
        self._begin_anew()

    @property
    def parts(self) -> dict[str, RRef[OwnedOptimizer]]:
        """The part of each owner, by its name."""
        return dict(self._parts.by_owner)

    def options(self) -> list[Options]:
        """The options of each group."""
        return [without_params(group) for group in self.param_groups]

    def members(self) -> list[list[int]]:
        """The indices of the parameters of each group."""
        return [[member.index for member in members] for members in self._members]

    def resume(self, options: Mapping[int, Options]) -> None:
        """The owners' state was put back from outside: go on from there with these options."""
        for index, known in options.items():
            self.param_groups[index].update(known)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The owners have dropped what they had accumulated, and what failed is made good."""
        self._treatments.clear()
        self._accumulated.clear()
        self._failure = None

    def _state_of(self, state: Mapping[int, Any], owner: str) -> dict[int, Any]:
        members = [member for group in self._members for member in group]
        owned = {member.index for member in members if member.rref.owner_name() == owner}
        return {index: kept for index, kept in state.items() if index in owned}


# A scheduler of torch wraps `step` to know that it was called, unless one has done so before.
# Dynamo does not trace the wrapper, and `step` notes by itself what it would note.
DistributedOptimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _refuse_in_graph(what: str) -> None:
    if is_dynamo_compiling():
        raise OptimizerError(
            f"{what} cannot be a part of a graph: enter the context outside of the compiled "
            f"function, and call {what} there, between the compiled part and step."
        )


def _by_owner(index: int, members: Iterable[Member], options: Options) -> dict[str, Group]:
    """The part of a parameter group that each owner has."""
    owned: dict[str, list[Member]] = {}
    for member in members:
        owned.setdefault(member.rref.owner_name(), []).append(member)
    return {owner: Group(index, tuple(part), options) for owner, part in owned.items()}


def _as_groups(params: Any) -> list[dict[str, Any]]:
    if not isinstance(params, Iterable) or isinstance(params, Tensor | torch.nn.Module | Set):
        return [{"params": params}]
    items = list(params)
    return items if items and isinstance(items[0], dict) else [{"params": items}]


def _worst(norms: Mapping[int, Tensor]) -> int:
    return max(norms, key=lambda index: float(torch.nan_to_num(norms[index], nan=float("inf"))))
