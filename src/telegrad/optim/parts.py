"""The driver's end of the parts that a distributed optimizer has on the owners of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from telegrad.autograd.api import autograd_of
from telegrad.optim.owned import Founded, Group, OwnedOptimizer, found_part
from telegrad.rpc import RRef, get_worker_info, rpc_async
from telegrad.rpc.calls import Pending
from telegrad.rpc.rref import begin_method, begin_method_async, finish_method


class Parts:
    """One part for each owner. What is asked of several is asked of all at once."""

    def __init__(
        self,
        make_optimizer: Callable[..., Optimizer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._make = (make_optimizer, args, kwargs)
        self.key = autograd_of().next_message()
        """What all parts are known by in a pass. No other number of the job is the same."""
        self.by_owner: dict[str, RRef[OwnedOptimizer]] = {}

    def found(self, groups: Mapping[str, list[Group]]) -> dict[str, Founded]:
        """Have workers that own none yet make their parts."""
        make, args, kwargs = self._make
        here = get_worker_info().name
        futures = {
            owner: rpc_async(owner, found_part, (make, part, args, kwargs, self.key))
            for owner, part in groups.items()
            if owner != here
        }
        made = (
            {here: found_part(make, groups[here], args, kwargs, self.key)} if here in groups else {}
        )
        made.update({owner: future.wait() for owner, future in futures.items()})
        self.by_owner.update({owner: founded.part for owner, founded in made.items()})
        return made

    def on_all(self, method: str, *args: Any) -> dict[str, Any]:
        return self.on_owners(method, dict.fromkeys(self.by_owner, args))

    def on_owners(self, method: str, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        answers, failed = self.attempt(method, calls)
        for error in failed.values():
            raise error
        return answers

    def attempt(
        self, method: str, calls: Mapping[str, tuple[Any, ...]]
    ) -> tuple[dict[str, Any], dict[str, BaseException]]:
        """Call a method of several parts at once; what each returned, or raised."""
        begun: dict[str, Pending] = {}
        leaving: list[Callable[[], None]] = []
        here: list[str] = []
        answers: dict[str, Any] = {}
        failed: dict[str, BaseException] = {}
        for owner, args in calls.items():
            part = self.by_owner[owner]
            if part.is_owner():
                here.append(owner)
                continue
            try:
                begun[owner] = begin_method(part, None, method, args, None, None, leaving)
            except Exception as error:
                failed[owner] = error
        # Together: who gets the first may be put on this core, before the others have theirs.
        for leave in leaving:
            leave()
        # This worker's own part runs while the others work.
        for owner in (*here, *begun):
            part = self.by_owner[owner]
            try:
                if owner in begun:
                    answers[owner] = finish_method(part, begun[owner])
                else:
                    answers[owner] = getattr(part.local_value(), method)(*calls[owner])
            except Exception as error:
                failed[owner] = error
        return answers, failed

    def keep(self, number: int) -> None:
        """All have made the step: let them forget how to undo it. Nobody waits for that."""
        for part in self.by_owner.values():
            if part.is_owner():
                part.local_value().forget_undo(number)
            else:
                begin_method_async(part, None, "forget_undo", (number,), {})
