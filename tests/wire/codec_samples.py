"""What the codec's tests send: classes and functions that need names to be imported by; frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, IntFlag, auto
from functools import wraps
from typing import Any, NamedTuple

from telegrad.wire.codec import Trust, export, extend
from telegrad.wire.frames import INLINE, head_of


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Node:
    name: str
    links: list[Any] = field(default_factory=list)
    cache: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any


class Color(Enum):
    RED = 1
    BLUE = "blue"


class Access(Flag):
    READ = auto()
    WRITE = auto()


class Opaque:
    """Known to nobody but pickle."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self, x: int) -> tuple[str, int]:
        return "method", x

    @classmethod
    def made(cls) -> Opaque:
        return cls()


class Ticket:
    """An extension type: travels as its number, and tells its scope."""

    def __init__(self, number: Any) -> None:
        self.number = number


def _reduce(ticket: Ticket, scope: Any) -> Any:
    scope.append(("leaves", ticket.number))
    return ticket.number


def _rebuild(number: Any, scope: Any) -> Ticket:
    scope.append(("arrives", number))
    return Ticket(number)


extend("test.ticket", Ticket, _reduce, _rebuild, trust=Trust.DATA)


@export
def exported(x: int) -> int:
    return x


def unexported(x: int) -> int:
    return x


@export
@dataclass
class Record:
    a: Any
    b: Any = None

    def total(self) -> Any:
        return self.a


@export
class Pair(NamedTuple):
    x: Any
    y: Any


@export
class Mode(Enum):
    ON = 1
    OFF = 2


@export
@dataclass(frozen=True)
class Pairing:
    """Hashed by its fields."""

    a: Any
    b: Any = None


@export
@dataclass(frozen=True)
class Noted:
    """Compared by a field that is not hashed."""

    key: Any
    note: Any = field(default=None, hash=False)


@export
@dataclass(frozen=True)
class Late:
    """Can be hashed before it has its fields."""

    a: Any = None
    b: Any = None


@export
class Rights(Flag):
    READ = auto()
    WRITE = auto()


@export
class Modes(IntFlag):
    """With a gap between its bits, which `~` sets."""

    READ = 1
    RUN = 4


@export
class Many(IntFlag):
    """Of more combinations than a worker keeps."""

    FIRST = 1
    LAST = 1 << 20


def _doubling(fn: Any) -> Any:
    @wraps(fn)
    def doubled(x: int) -> int:
        return 2 * int(fn(x))

    return doubled


@_doubling
def decorated(x: int) -> int:
    return x


class Slotted:
    __slots__ = ("hidden",)


@dataclass
class OnSlots(Slotted):
    """A dataclass with a slot that is no field."""

    shown: int


def whole_frame(
    kind: int,
    call_id: int,
    note: bytes,
    meta: bytes,
    buffers: Sequence[memoryview],
    seq: int,
    ack: int,
) -> bytes:
    """A frame that frees no slots and has all of its buffers inline."""
    rows = [(buffer.nbytes, INLINE) for buffer in buffers]
    inline = sum(size for size, _ in rows)
    return b"".join((head_of(kind, call_id, meta, note, rows, seq, ack, inline), *buffers))
