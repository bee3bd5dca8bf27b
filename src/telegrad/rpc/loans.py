"""Values that are lent to a call, for the time that it runs.

To pass a reference on is to tell its owner: the receiver may keep it. A call that only needs the
value while it runs, and whose caller keeps its own reference until then, can name the value
instead. Then there is nothing to register, to confirm or to release.

What must never happen: that a loan outlives its call. So loans are made of arguments just before a
call leaves, and replaced by their values before the function sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telegrad.rpc.errors import Refused
from telegrad.rpc.reference_messages import ReferenceId, read_reference

if TYPE_CHECKING:
    from telegrad.rpc.node import Node
    from telegrad.rpc.rref import RRef


@dataclass(frozen=True, slots=True)
class Loan:
    """A value that a call names, whose caller keeps a reference to it."""

    reference: tuple[int, ...]

    @classmethod
    def of(cls, rref: RRef[Any]) -> Loan:
        rref._check_usable("lending its value")
        return cls(tuple(rref._reference))

    def take(self, node: Node) -> Any:
        """The value on this worker: waits for it, and raises what went wrong in its making."""
        if node.data_only:
            # No limit bounds what would come here in answers, for a call that brought next to none.
            raise Refused(f"worker {node.info.name!r} takes data only and fetches none for others")
        named = self.reference
        reference = named if type(named) is ReferenceId else read_reference(named)
        if reference.owner == node.info.id:
            return node.values.value(reference, node.timeout)
        return node.wait(node.values.ask_for(reference))


def take_all(args: tuple[Any, ...], node: Node) -> tuple[Any, ...]:
    """Arguments as their function is given them: each that is a loan as its value."""
    if Loan not in {*map(type, args)}:
        return args
    return tuple([each.take(node) if type(each) is Loan else each for each in args])
