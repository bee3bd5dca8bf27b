"""References as compiled functions send them.

A graph knows a reference that existed before by its numbers, which Dynamo guards. The RRef itself
is found by them when the graph runs, so that calls of its methods go the short way of eager mode,
which only names the value, and keeps the RRef until the answer is there.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from telegrad.autograd.context import current_context
from telegrad.compile.calls import record_of
from telegrad.compile.handles import MadeRRef
from telegrad.compile.tracing import constant_of_graph
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.passage import Passage
from telegrad.rpc.reference_messages import ForkId, Handle, ReferenceId
from telegrad.rpc.rref import RRef
from telegrad.wire.names import EXTENSIONS, Extension
from telegrad.wire.trust import Trust


class Borrowed:
    """A reference that somebody else keeps alive, sent in the name of its RRef."""

    __slots__ = ("handle", "reference")

    def __init__(self, reference: ReferenceId, handle: Handle) -> None:
        self.reference = reference
        self.handle = handle


_known: weakref.WeakValueDictionary[tuple[int, ...], RRef[Any]] = weakref.WeakValueDictionary()


@constant_of_graph
def remember(rref: RRef[Any]) -> None:
    """A graph that is being traced uses this reference. Runs while Dynamo traces."""
    _known[(*rref._reference, *rref._handle)] = rref


def known_reference(numbers: tuple[int, ...]) -> RRef[Any] | Borrowed:
    """The reference of these numbers. Several RRefs of a value's owner have the same: the one that
    was remembered may be gone, and another be there for which the guards hold."""
    known = _known.get(numbers)
    if known is not None:
        return known
    rest = numbers[3:]
    handle = ForkId(*rest) if len(rest) == 2 else ReferenceId(*rest)
    return Borrowed(ReferenceId(*numbers[:3]), handle)


def real_reference(token: Tensor) -> RRef[Any]:
    """The RRef behind a token."""
    rref: RRef[Any] = record_of(token).reference
    return rref


def _leave_borrowed(borrowed: Borrowed, passage: Passage | None) -> object:
    return _leave(borrowed.handle, passage)


def _leave(handle: Handle, passage: Passage | None) -> object:
    if passage is None:
        raise TelegradError("A reference can be packed only as a part of a call.")
    transfer = passage.node.values.share(handle, passage.worker)
    return (tuple(transfer.reference), tuple(transfer.fork))


def _cannot_arrive(data: object, passage: object) -> Any:
    raise AssertionError("what travels under the name of RRef arrives as one")


def _leave_made(made: MadeRRef, passage: Passage | None) -> object:
    if made.token.requires_grad and current_context() is not None:
        raise TelegradError(
            "A reference that a compiled function made with gradients cannot be the argument of a "
            "call outside of compiled functions: its gradient would be lost. Use its methods "
            "(to_here, rpc_sync, rpc_async), or make the call in a compiled function."
        )
    return _leave(real_reference(made.token)._handle, passage)


for _cls, _reduce in ((Borrowed, _leave_borrowed), (MadeRRef, _leave_made)):
    # They travel under the name of RRef, and arrive as one: the receiver need not know this room.
    EXTENSIONS[_cls] = Extension("rref", _cls, _reduce, _cannot_arrive, Trust.DATA)
