"""What workers say to each other in a pass, and its form on the wire.

On the wire a message is a parcel: bytes with all the numbers and texts, and the tensors. Nearly
every message has the gradient of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from struct import Struct, pack, unpack_from
from struct import error as StructError
from typing import Any, NamedTuple

from torch import Tensor, strided

from telegrad.autograd.errors import AutogradError
from telegrad.autograd.nodes import compiled
from telegrad.rpc.errors import WorkerLost, in_few_words
from telegrad.rpc.failures import traceback_of, words_of
from telegrad.wire.parcel import Parcel


class Mode(Enum):
    """How a pass deals with tensors that crossed and were not used."""

    SMART = "smart"
    """Absence travels like gradients do: any program gets the gradients of one process."""
    FAST = "fast"
    """Everything that crossed is expected to be used; a broken expectation is an error."""


class Sequel(NamedTuple):
    """What each worker does as soon as its own part of the pass is complete (see `sequels`)."""

    key: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller of `backward` asked for."""

    retain_graph: bool = False
    create_graph: bool = False
    mode: Mode = Mode.SMART
    sequel: Sequel | None = None
    bits: int = field(init=False, repr=False, compare=False)
    sequel_bytes: bytes = field(init=False, repr=False, compare=False)
    """What a message says of the sequel. Every gradient of the pass does."""

    def __post_init__(self) -> None:
        bits = self.retain_graph | self.create_graph << 1 | (self.mode is Mode.FAST) << 2
        said = b""
        if self.sequel is not None:
            bits |= _FOLLOWED
            said = _SEQUEL.pack(self.sequel.key, len(self.sequel.data)) + self.sequel.data
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "sequel_bytes", said)

    @classmethod
    def of(cls, retain_graph: object, create_graph: object, mode: Mode) -> Options:
        """The same object for the same options."""
        return _OPTIONS[bool(retain_graph) | bool(create_graph) << 1 | (mode is Mode.FAST) << 2]


_FOLLOWED = 32
_SEQUEL = Struct("<QI")
"""The key, and how many bytes of data follow."""
_OPTIONS = tuple(
    Options(bool(bits & 1), bool(bits & 2), Mode.FAST if bits & 4 else Mode.SMART)
    for bits in range(8)
)
"""All that there are without a sequel, each at the place that its bits name."""


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
    lost: str = ""
    """The name of the worker whose loss it was, if it was one."""
    cause: str = ""
    """Why that one counts as gone."""

    @classmethod
    def of(cls, error: BaseException, worker: int, worker_name: str) -> Failure:
        text = in_few_words(traceback_of(error), MOST_OF_A_TEXT)
        message = in_few_words(words_of(error), MOST_OF_A_TEXT) or type(error).__name__
        if isinstance(error, WorkerLost):
            return cls(worker, worker_name, message, text, error.worker, error.cause)
        return cls(worker, worker_name, message, text)


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


TOPIC = "autograd.pass"

_BEGIN, _GRADIENT, _ABSENT, _ACK, _FAIL = range(5)
_ENGAGES, _ACKNOWLEDGES = 8, 16
_HEAD = Struct("<BBIIQQQQ")
MOST_OF_A_SEQUEL = 1 << 14
"""Bytes of its data. Every gradient of the pass has them along, and all participants keep them."""
_NONE = 0xFFFFFFFF
"""Stands for an absent gradient where tensors are numbered."""
_SMALL = 4096


def _compact(gradient: Tensor) -> Tensor:
    """Small gradients leave faster with their elements in a row, which those of `sum` are not."""
    if gradient.is_contiguous() or gradient.layout is not strided or gradient.numel() > _SMALL:
        return gradient
    return gradient.contiguous()


def encode(context_id: int, pass_id: int, message: Message) -> Parcel:
    if type(message) is not Gradient:
        return _encode_other(context_id, pass_id, message)
    return write(context_id, pass_id, message) or _encode(context_id, pass_id, message)


def _encode(context_id: int, pass_id: int, message: Gradient) -> Parcel:
    options, (over, failed), engages, number, gradients, acknowledges = message
    bits = options.bits
    if engages:
        bits |= _ENGAGES
    if acknowledges:
        bits |= _ACKNOWLEDGES
    count = len(gradients)
    head = _HEAD.pack(_GRADIENT, bits, len(failed), count, context_id, pass_id, over, number)
    head += options.sequel_bytes
    if failed:
        head += pack(f"<{len(failed)}Q", *failed)
    only = gradients[0] if count == 1 else None
    if only is not None:
        return Parcel(TOPIC, head, [only if options.create_graph else _compact(only)])
    places, tensors = _numbered(gradients)
    head += pack(f"<{count}I", *places)
    if not options.create_graph:
        tensors = [_compact(tensor) for tensor in tensors]
    return Parcel(TOPIC, head, tensors)


def _encode_other(context_id: int, pass_id: int, message: Message) -> Parcel:
    kind = bits = over = number = 0
    numbers: tuple[int, ...] = ()
    texts = sequel = b""
    match message:
        case Ack():
            kind = _ACK
        case Begin(options, history):
            kind, over, numbers = _BEGIN, history.over_below, history.failed
            bits = options.bits
            sequel = options.sequel_bytes
        case Absent(messages):
            kind, numbers = _ABSENT, messages
        case Fail(failure):
            kind, number = _FAIL, failure.worker
            texts = _write_texts(
                failure.worker_name,
                failure.message,
                failure.traceback,
                failure.lost,
                failure.cause,
            )
    head = _HEAD.pack(kind, bits, len(numbers), 0, context_id, pass_id, over, number)
    return Parcel(TOPIC, head + sequel + pack(f"<{len(numbers)}Q", *numbers) + texts, ())


def _read_followed(bits: int, data: bytes) -> tuple[Options, int]:
    """What is asked for, with a sequel, and where in a message the rest begins."""
    key, size = _SEQUEL.unpack_from(data, _HEAD.size)
    at = _HEAD.size + _SEQUEL.size
    if size > MOST_OF_A_SEQUEL:
        raise AutogradError(
            f"A message of a pass has a sequel of {size} bytes; at most {MOST_OF_A_SEQUEL} are "
            "taken."
        )
    if len(data) < at + size:
        raise AutogradError("A message of a pass has less of its sequel than it says.")
    return _followed(bits & 7, key, data[at : at + size]), at + size


@lru_cache(maxsize=16)
def _followed(bits: int, key: int, data: bytes) -> Options:
    """The same for all steps of an optimizer of which nothing changes but the parameters."""
    known = _OPTIONS[bits]
    return Options(known.retain_graph, known.create_graph, known.mode, Sequel(key, data))


def _numbered(gradients: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    """The tensors, each once, and for each place which of them it has."""
    tensors = list({id(g): g for g in gradients if g is not None}.values())
    number_of = {id(tensor): number for number, tensor in enumerate(tensors)}
    return [_NONE if g is None else number_of[id(g)] for g in gradients], tensors


def decode(parcel: Any) -> tuple[int, int, Message]:
    """Context id, pass id and message."""
    return read(parcel) or _decode(parcel)


def _decode(parcel: Any) -> tuple[int, int, Message]:
    if type(parcel) is not Parcel:
        raise AutogradError("A message of a pass cannot be read: it is not in the form of one.")
    data = parcel.data
    try:
        kind, bits, count, width, context_id, pass_id, over, number = _HEAD.unpack_from(data)
        options, at = _OPTIONS[bits & 7], _HEAD.size
        if bits & _FOLLOWED:
            options, at = _read_followed(bits, data)
        numbers = unpack_from(f"<{count}Q", data, at) if count else ()
    except StructError as problem:
        raise AutogradError(f"A message of a pass cannot be read: {problem}.") from problem
    message: Message
    if kind == _GRADIENT:
        at += 8 * count
        gradients: Sequence[Tensor | None] = parcel.tensors
        if not (width == len(gradients) == 1 and len(data) == at):
            gradients = _placed(parcel, width, at, number)
        history = History(over, numbers) if over else NO_HISTORY
        engages, acknowledges = bits & _ENGAGES != 0, bits & _ACKNOWLEDGES != 0
        message = Gradient(options, history, engages, number, gradients, acknowledges)
    elif kind == _ACK:
        message = Ack()
    elif kind == _BEGIN:
        message = Begin(options, History(over, numbers))
    elif kind == _ABSENT:
        message = Absent(numbers)
    elif kind == _FAIL:
        message = Fail(_read_failure(number, data[at + 8 * count :]))
    else:
        raise AutogradError(f"A message of the unknown kind {kind} came for pass {pass_id}.")
    return context_id, pass_id, message


def write(context_id: int, pass_id: int, message: Gradient) -> Parcel | None:
    """The gradient of one tensor, written by compiled code; None where there is none, or if there
    is more to say."""
    return None


def read(parcel: Any) -> tuple[int, int, Gradient] | None:
    """As `write`, the other way."""
    return None


if compiled is not None:
    compiled.found_in_messages(Parcel, Gradient, TOPIC, _OPTIONS, NO_HISTORY, _read_followed)
    write, read = compiled.write, compiled.read


def _placed(parcel: Parcel, width: int, at: int, number: int) -> list[Tensor | None]:
    """The gradients of several tensors: some may be absent, or the same."""
    tensors = parcel.tensors
    if len(parcel.data) == at + 4 * width:
        places = unpack_from(f"<{width}I", parcel.data, at)
        if {*range(len(tensors))} == {*places} - {_NONE}:
            return [None if place == _NONE else tensors[place] for place in places]
    raise AutogradError(
        f"A message announces {width} gradients for message {number}, and brings {len(tensors)} "
        "tensors that do not fill their places."
    )


MOST_OF_A_TEXT = 20_000
"""Characters of each text of a failure, the traceback among them. All participants are told it, and
keep it while the context lasts."""
_LENGTHS = Struct("<5I")


def _write_texts(*texts: str) -> bytes:
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join((_LENGTHS.pack(*map(len, parts)), *parts))


def _read_failure(worker: int, data: bytes) -> Failure:
    if len(data) >= _LENGTHS.size:
        lengths = _LENGTHS.unpack_from(data)
        if _LENGTHS.size + sum(lengths) == len(data):
            ends = list(accumulate(lengths, initial=_LENGTHS.size))
            parts = [data[begin:end] for begin, end in pairwise(ends)]
            texts = [in_few_words(str(part, "utf-8", "replace"), MOST_OF_A_TEXT) for part in parts]
            return Failure(worker, *texts)
    raise AutogradError("A message says that a pass failed, but not how.")


_MESSAGE_KINDS = ("begin", "gradient", "absent", "ack", "fail")


def kind_of(parcel: Parcel) -> str:
    """What a message is, for those who only count or show messages."""
    return _MESSAGE_KINDS[parcel.data[0]]
