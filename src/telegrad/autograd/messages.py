"""What workers say to each other in a pass, and its form on the wire.

On the wire a message is a plain tuple that starts with its kind, context and pass: tuples of
numbers and tensors are what the codec packs fastest.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from telegrad.autograd.errors import AutogradError


class Mode(Enum):
    """How a pass deals with tensors that crossed and were not used."""

    SMART = "smart"
    """Absence travels like gradients do: any program gets the gradients of one process."""
    FAST = "fast"
    """Everything that crossed is expected to be used; a broken expectation is an error."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller of `backward` asked for."""

    retain_graph: bool = False
    create_graph: bool = False
    mode: Mode = Mode.SMART

    def to_bits(self) -> int:
        return self.retain_graph | self.create_graph << 1 | (self.mode is Mode.FAST) << 2

    @classmethod
    def from_bits(cls, bits: int) -> Options:
        return cls(bool(bits & 1), bool(bits & 2), Mode.FAST if bits & 4 else Mode.SMART)


@dataclass(frozen=True, slots=True)
class History:
    """What the initiator of a pass knows of its earlier passes in the same context."""

    over_below: int = 0
    """All its passes with smaller ids are over."""
    failed: tuple[int, ...] = ()
    """The latest of them that failed: what they found does not count."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first error of a pass, as all participants are told."""

    worker: int
    worker_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, worker: int, worker_name: str) -> Failure:
        text = "".join(traceback.format_exception(error))
        return cls(worker, worker_name, str(error) or type(error).__name__, text)


@dataclass(frozen=True, slots=True)
class Begin:
    """The pass has begun; take part in it, and acknowledge when your part has ended."""

    options: Options
    history: History


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The gradients of the tensors of one message; also says `Begin` if `engages`."""

    options: Options
    history: History
    engages: bool
    message: int
    gradients: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class Absent:
    """The tensors of these messages get no gradient in this pass."""

    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """Answers one message that engages: that part of the pass has ended."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The pass has failed."""

    failure: Failure


Message = Begin | Gradient | Absent | Ack | Fail


_BEGIN, _GRADIENT, _ABSENT, _ACK, _FAIL = range(5)


def encode(context_id: int, pass_id: int, message: Message) -> tuple[Any, ...]:
    match message:
        case Gradient(options, history, engages, number, gradients):
            bits = options.to_bits() | engages << 3
            past = (history.over_below, history.failed)
            body: tuple[Any, ...] = (_GRADIENT, bits, *past, number, tuple(gradients))
        case Ack():
            body = (_ACK,)
        case Begin(options, history):
            body = (_BEGIN, options.to_bits(), history.over_below, history.failed)
        case Absent(messages):
            body = (_ABSENT, messages)
        case Fail(failure):
            f = failure
            body = (_FAIL, f.worker, f.worker_name, f.message, f.traceback)
    return (context_id, pass_id, *body)


def decode(payload: tuple[Any, ...]) -> tuple[int, int, Message]:
    """Context id, pass id and message."""
    context_id, pass_id, kind, *body = payload
    message: Message
    if kind == _GRADIENT:
        bits, over, failed, number, gradients = body
        options = Options.from_bits(bits)
        message = Gradient(options, History(over, failed), bool(bits & 8), number, gradients)
    elif kind == _ACK:
        message = Ack()
    elif kind == _BEGIN:
        bits, over, failed = body
        message = Begin(Options.from_bits(bits), History(over, failed))
    elif kind == _ABSENT:
        message = Absent(body[0])
    elif kind == _FAIL:
        message = Fail(Failure(*body))
    else:
        raise AutogradError(f"A message of the unknown kind {kind} came for pass {pass_id}.")
    return context_id, pass_id, message
