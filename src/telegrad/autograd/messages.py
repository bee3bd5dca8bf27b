"""What workers say to each other in a pass, and its form on the wire.

On the wire a message is a tuple: bytes with all the numbers, then the tensors or texts. The codec
has few objects to look at that way.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from struct import Struct, pack, unpack_from
from struct import error as StructError
from typing import Any, NamedTuple

from torch import Tensor, strided

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


_OPTIONS = tuple(
    Options(bool(bits & 1), bool(bits & 2), Mode.FAST if bits & 4 else Mode.SMART)
    for bits in range(8)
)
"""All that there are, each at the place that its bits name."""


class History(NamedTuple):
    """What the initiator of a pass knows of its earlier passes in the same context."""

    over_below: int = 0
    """All its passes with smaller ids are over."""
    failed: tuple[int, ...] = ()
    """The latest of them that failed: what they found does not count."""


NO_HISTORY = History()


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


class Gradient(NamedTuple):
    """The gradients of the tensors of one message; may say `Begin` and `Ack` along with it."""

    options: Options
    history: History
    engages: bool
    message: int
    gradients: Sequence[Tensor | None]
    acknowledges: bool = False


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
_ENGAGES, _ACKNOWLEDGES = 8, 16
_HEAD = Struct("<BBHHQQQQ")


_SMALL = 4096


def _compact(gradient: Tensor) -> Tensor:
    """Small gradients leave faster with their elements in a row, which those of `sum` are not."""
    if gradient.layout is not strided or gradient.is_contiguous() or gradient.numel() > _SMALL:
        return gradient
    return gradient.contiguous()


def encode(context_id: int, pass_id: int, message: Message) -> tuple[Any, ...]:
    kind = bits = over = number = 0
    numbers: tuple[int, ...] = ()
    absent = b""
    rest: tuple[Any, ...] = ()
    match message:
        case Gradient(options, history, engages, number, gradients, acknowledges):
            kind, over, numbers = _GRADIENT, history.over_below, history.failed
            bits = options.to_bits() | _ENGAGES * engages | _ACKNOWLEDGES * acknowledges
            absent = bytes([g is None for g in gradients])
            rest = tuple([g for g in gradients if g is not None])
            if not options.create_graph:
                rest = tuple([_compact(g) for g in rest])
        case Ack():
            kind = _ACK
        case Begin(options, history):
            kind, over, numbers = _BEGIN, history.over_below, history.failed
            bits = options.to_bits()
        case Absent(messages):
            kind, numbers = _ABSENT, messages
        case Fail(failure):
            kind, number = _FAIL, failure.worker
            rest = (failure.worker_name, failure.message, failure.traceback)
    head = _HEAD.pack(kind, bits, len(numbers), len(absent), context_id, pass_id, over, number)
    if numbers:
        head += pack(f"<{len(numbers)}Q", *numbers)
    return (head + absent, *rest)


def decode(payload: tuple[Any, ...]) -> tuple[int, int, Message]:
    """Context id, pass id and message."""
    head, *rest = payload
    try:
        kind, bits, count, width, context_id, pass_id, over, number = _HEAD.unpack_from(head)
        numbers = unpack_from(f"<{count}Q", head, _HEAD.size) if count else ()
    except (StructError, TypeError) as problem:
        raise AutogradError(f"A message of a pass cannot be read: {problem}.") from problem
    message: Message
    if kind == _GRADIENT:
        absent = head[_HEAD.size + 8 * count :]
        if len(absent) != width or len(rest) != absent.count(0):
            raise AutogradError(
                f"A message announces {width} gradients for message {number}, and brings "
                f"{len(rest)} for {absent.count(0)} places."
            )
        if len(rest) < width:
            present = iter(rest)
            rest = [None if gone else next(present) for gone in absent]
        history = History(over, numbers) if over else NO_HISTORY
        engages, acknowledges = bits & _ENGAGES != 0, bits & _ACKNOWLEDGES != 0
        message = Gradient(_OPTIONS[bits & 7], history, engages, number, rest, acknowledges)
    elif kind == _ACK:
        message = Ack()
    elif kind == _BEGIN:
        message = Begin(_OPTIONS[bits & 7], History(over, numbers))
    elif kind == _ABSENT:
        message = Absent(numbers)
    elif kind == _FAIL:
        message = Fail(_read_failure(number, rest))
    else:
        raise AutogradError(f"A message of the unknown kind {kind} came for pass {pass_id}.")
    return context_id, pass_id, message


def _read_failure(worker: int, texts: list[Any]) -> Failure:
    match texts:
        case [str(name), str(message), str(trace)]:
            return Failure(worker, name, message, trace)
    raise AutogradError("A message says that a pass failed, but not how.")


_MESSAGE_KINDS = ("begin", "gradient", "absent", "ack", "fail")


def kind_of(payload: tuple[Any, ...]) -> str:
    """What a payload is, for those who only count or show messages."""
    return _MESSAGE_KINDS[payload[0][0]]
