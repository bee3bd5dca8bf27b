"""Where the graph is cut when tensors leave, and joined when they arrive.

A message of a context that carries tensors which need gradient becomes one *send* on the worker it
leaves and one *recv* on the worker it reaches, with the same message id. See `nodes`.

Beside the tensors travels a short *note*: context id, message id, which tensors need gradient,
and which passes had begun at the sender. Those passes do not wait for this message; any other pass
that has begun at the receiver does, and is answered by *none* at once.

The note with which a worker first hears of a context may say that its origin has released all
earlier ones. A release is told a little late (see `releases`); without this, the gradients of one
step of training would still be in memory while the next one makes its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.autograd import nodes
from telegrad.autograd.container import Container
from telegrad.autograd.context import (
    WORKER_SHIFT,
    Context,
    RecvRecord,
    Scope,
    SendRecord,
    current_scope,
    speaking_for,
)
from telegrad.autograd.enclosed import EnclosedSend, looking_for_changes
from telegrad.autograd.errors import AutogradError

if TYPE_CHECKING:
    from telegrad.autograd.refusals import Refusals


_RECORDING, _ALONE = 1, 2
_NOTE_HEAD = struct.Struct("<QQHH")
_NOTE_OF_ONE = struct.Struct("<QQHHI")


class Note(NamedTuple):
    """The bytes that travel beside the tensors of a message."""

    context: int
    message: int = 0
    indices: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    recording: bool = True
    alone: bool = False
    """The origin of the context has released all that it made before."""

    def pack(self) -> bytes:
        return pack_note(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Note:
        return cls(*unpack_note(data))


def pack_note(
    context: int,
    message: int = 0,
    indices: Sequence[int] = (),
    begun: Sequence[int] = (),
    recording: bool = True,
    alone: bool = False,
) -> bytes:
    """A note as it travels. Every call makes one, so it need not become a `Note` first."""
    flags = recording | _ALONE if alone else recording
    if len(indices) == 1 and not begun:
        return _NOTE_OF_ONE.pack(context, message, 0, flags, indices[0])
    head = _NOTE_HEAD.pack(context, message, len(begun), flags)
    if not message:
        return head
    return head + struct.pack(f"<{len(begun)}Q{len(indices)}I", *begun, *indices)


def unpack_note(data: bytes) -> tuple[int, int, tuple[int, ...], tuple[int, ...], bool, bool]:
    """The fields of a `Note`."""
    try:
        if len(data) == _NOTE_OF_ONE.size:
            context, message, begun, flags, index = _NOTE_OF_ONE.unpack(data)
            if not begun:
                return context, message, (index,), (), flags & _RECORDING != 0, flags & _ALONE != 0
        context, message, begun, flags = _NOTE_HEAD.unpack_from(data)
        rest = len(data) - _NOTE_HEAD.size - 8 * begun
        numbers = struct.unpack_from(f"<{begun}Q{rest // 4}I", data, _NOTE_HEAD.size)
    except struct.error as error:
        raise AutogradError(
            f"An autograd note of {len(data)} bytes cannot be read: {error}."
        ) from error
    recording, alone = flags & _RECORDING != 0, flags & _ALONE != 0
    return context, message, numbers[begun:], numbers[:begun], recording, alone


class Records(Protocol):
    """The part of the autograd service that a message needs."""

    container: Container
    refusals: Refusals
    next_message: Callable[[], int]

    def missed(self, context: Context, passes: list[int], record: RecvRecord) -> None: ...

    def end_earlier(self, context: Context) -> None: ...


def service_of(node: Any) -> Records:
    records: Records = node.services["autograd"]
    return records


class AutogradCrossing:
    """The hook by which the rpc layer lets autograd see its messages."""

    current = staticmethod(current_scope)

    def leaving(self, node: Any, to: int, tensors: Sequence[Tensor], scope: Scope) -> bytes:
        """Record a send if the message needs one; the note that travels with it."""
        context = scope.context
        service = service_of(node)
        alone = False
        if to not in context.known_workers:
            context.known_workers.add(to)
            alone = service.container.is_alone(context)
        if context.released:
            return b""
        if not scope.recording:
            return pack_note(context.id, recording=False, alone=alone)
        record: SendRecord | EnclosedSend
        if scope.enclosed is None:
            sent = nodes.send(service.next_message, to, tensors)
            if sent is None:
                return pack_note(context.id, alone=alone)
            message, made, indices = sent
            record = SendRecord(message, to, made)
        else:
            indices = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
            if not indices:
                return pack_note(context.id, alone=alone)
            message = service.next_message()
            leaving = [tensors[index] for index in indices]
            scope.enclosed.sent(message, leaving)
            record = EnclosedSend(message, to, [(each.shape, each.dtype) for each in leaving])
        begun = context.add_send(record)
        return pack_note(context.id, message, indices, begun, alone=alone)

    def arriving(
        self, node: Any, sender: int, note: bytes, tensors: list[Tensor]
    ) -> tuple[list[Tensor], Scope | None]:
        """Record a recv if the note names one; the tensors as the user sees them."""
        if not note:
            return tensors, None
        context_id, message, indices, begun, recording, alone = unpack_note(note)
        service = service_of(node)
        context = service.container.join(context_id, sender)
        if context is None:
            return tensors, None
        if alone and sender == context.origin:
            service.end_earlier(context)
        if message:
            _check_received(node, sender, message, indices, tensors)
            made = nodes.receive(message, sender, indices, tensors)
            record = RecvRecord(message, sender, made)
            missed = context.add_recv(record, begun)
            if missed:
                service.missed(context, missed, record)
        return tensors, context.recording if recording else context.silent

    def never_left(self, node: Any, to: int, note: bytes) -> None:
        context_id, message, *_ = unpack_note(note)
        if message:
            service_of(node).refusals.never_left(context_id, message, to)

    def never_arrived(self, node: Any, sender: int, note: bytes) -> None:
        context_id, message, *_ = unpack_note(note)
        if message:
            service_of(node).refusals.never_arrived(context_id, message, sender)

    def enter(self, node: Any, scope: Scope) -> speaking_for:
        """While a handler runs for `scope`: its context is current, with the caller's grad mode."""
        return looking_for_changes(scope) if scope.context.enclosures else speaking_for(scope)


def _check_received(
    node: Any, sender: int, message: int, indices: tuple[int, ...], tensors: list[Tensor]
) -> None:
    if message >> WORKER_SHIFT != sender:
        raise AutogradError(
            f"Message {message} from worker {node.members.name(sender)!r} has a number that worker "
            f"{node.members.name(message >> WORKER_SHIFT)!r} gives."
        )
    if not indices or max(indices) >= len(tensors):
        raise AutogradError(
            f"Message {message} from worker {node.members.name(sender)!r} says that its tensor "
            f"{max(indices, default=None)} needs gradient, but carries {len(tensors)} tensors."
        )
