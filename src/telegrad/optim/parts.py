"""The driver's end of the parts that a distributed optimizer has on the owners of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from telegrad.autograd.api import autograd_of
from telegrad.optim.owned import Founded, Group, OwnedOptimizer, found_part
from telegrad.rpc import RRef, rpc_async
from telegrad.rpc.calls import Pending
from telegrad.rpc.current import current_node
from telegrad.rpc.rref import begin_method, begin_method_async


class Parts:
    """One part for each owner. What is asked of several is asked of all at once."""

    def __init__(
        self,
        make_optimizer: Callable[..., Optimizer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._make = (make_optimizer, args, kwargs)
        self._node = current_node()
        self._here = self._node.info.name
        self.key = autograd_of().next_message()
        """What all parts are known by in a pass. No other number of the job is the same."""
        self.by_owner: dict[str, RRef[OwnedOptimizer]] = {}

    def found(self, groups: Mapping[str, list[Group]]) -> dict[str, Founded]:
        """Have workers that own none yet make their parts."""
        make, args, kwargs = self._make
        here = self._here
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
        begun: list[tuple[str, Pending]] = []
        leaving: list[Callable[[], None]] = []
        answers: dict[str, Any] = {}
        failed: dict[str, BaseException] = {}
        for owner, args in calls.items():
            if owner != self._here:
                part = self.by_owner[owner]
                try:
                    pending = begin_method(part, None, method, args, None, None, leaving)
                    begun.append((owner, pending))
                except Exception as error:
                    failed[owner] = error
        # Together: who gets the first may be put on this core, before the others have theirs.
        for leave in leaving:
            leave()
        # This worker's own part runs while the others work.
        if self._here in calls:
            try:
                own = self.by_owner[self._here].local_value()
                answers[self._here] = getattr(own, method)(*calls[self._here])
            except Exception as error:
                failed[self._here] = error
        for owner, pending in begun:
            try:
                answers[owner] = self._node.wait(pending)
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
