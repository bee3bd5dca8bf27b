"""What workers say to each other of references, and how that travels.

`references.py` decides who says what, and has the words. Each is a byte that says which, and
numbers; several travel in one message, one behind the other.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from telegrad.rpc.errors import in_few_words
from telegrad.rpc.worker import is_worker_id


class ReferenceId(NamedTuple):
    owner: int
    created_on: int
    number: int


class ForkId(NamedTuple):
    """`created_on` is the worker that made the fork: the one who passed it on, or called remote."""

    created_on: int
    number: int


Handle = ReferenceId | ForkId
"""What an RRef object stands for: on the owner the reference itself, elsewhere its fork."""


class Transfer(NamedTuple):
    """A reference on its way inside of a message from `fork.created_on`."""

    reference: ReferenceId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class Register:
    """To the owner: `holder` has this fork. The sender is the holder, or fenced from it."""

    transfer: Transfer
    holder: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """To a holder: the owner has its fork in the table."""

    fork: ForkId


@dataclass(frozen=True, slots=True)
class Unpin:
    """To the one who passed this fork on: it need not be protected any more."""

    fork: ForkId


@dataclass(frozen=True, slots=True)
class Release:
    """To the owner: this fork is gone."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Fence:
    """To every live worker: say when you accept nothing more from these."""

    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """The answer to Fence, after every registration that was owed."""

    lost: int


@dataclass(frozen=True, slots=True)
class Gone:
    """To a holder: the owner does not keep this value for it, and why.

    It keeps no more for this worker than it may; or a driver broke its duties.
    """

    fork: ForkId
    reason: str = "The owner does not have this value any more."


Message = Register | Accepted | Unpin | Release | Fence | Fenced | Gone


# Names in messages of others, as plain data.


def read_reference(data: Any) -> ReferenceId:
    match data:
        case (int(owner), int(created_on), int(number)) if _can_be_told(*data):
            return ReferenceId(owner, created_on, number)
    raise ValueError("a reference is named by three numbers")


def _fork(data: Any) -> ForkId:
    match data:
        case (int(created_on), int(number)) if _can_be_told(*data):
            return ForkId(created_on, number)
    raise ValueError("a fork is named by two numbers")


def _can_be_told(*numbers: int) -> bool:
    """Whether they fit into the words below: else no message of them could ever leave."""
    return all(0 <= number < 1 << 64 for number in numbers)


def read_transfer(data: Any) -> Transfer:
    reference, fork = data
    return Transfer(read_reference(reference), _fork(fork))


# The words as bytes.


class _Word(enum.IntEnum):
    REGISTER = 0
    ACCEPTED = 1
    UNPIN = 2
    RELEASE = 3
    FENCE = 4
    FENCED = 5
    GONE = 6


_NUMBERS: dict[int, struct.Struct] = {
    _Word.REGISTER: struct.Struct("<6Q"),
    _Word.ACCEPTED: struct.Struct("<2Q"),
    _Word.UNPIN: struct.Struct("<2Q"),
    _Word.RELEASE: struct.Struct("<5Q"),
    _Word.FENCE: struct.Struct("<Q"),  # how many workers follow
    _Word.FENCED: struct.Struct("<Q"),
    _Word.GONE: struct.Struct("<3Q"),  # the last: how many bytes of text follow
}


def write_message(message: Message) -> bytes:
    match message:
        case Release(transfer):
            return _written(_Word.RELEASE, *transfer.reference, *transfer.fork)
        case Register(transfer, holder):
            return _written(_Word.REGISTER, *transfer.reference, *transfer.fork, holder)
        case Accepted(fork):
            return _written(_Word.ACCEPTED, *fork)
        case Unpin(fork):
            return _written(_Word.UNPIN, *fork)
        case Fence(lost):
            return _written(_Word.FENCE, len(lost)) + struct.pack(f"<{len(lost)}Q", *lost)
        case Fenced(lost):
            return _written(_Word.FENCED, lost)
        case Gone(fork, reason):
            text = reason.encode(errors="replace")
            return _written(_Word.GONE, *fork, len(text)) + text


def _written(word: _Word, *numbers: int) -> bytes:
    return bytes((word,)) + _NUMBERS[word].pack(*numbers)


def read_messages(data: bytes) -> Iterator[Message]:
    """The messages in those bytes. `ValueError` where they are none."""
    at = 0
    while at < len(data):
        word = data[at]
        form = _NUMBERS.get(word)
        if form is None or len(data) - at <= form.size:
            raise ValueError("what came is no message of the reference protocol")
        numbers = form.unpack_from(data, at + 1)
        at += 1 + form.size
        match word:
            case _Word.RELEASE:
                yield Release(_transfer(numbers))
            case _Word.REGISTER:
                yield Register(_transfer(numbers), numbers[5])
            case _Word.ACCEPTED:
                yield Accepted(ForkId(*numbers))
            case _Word.UNPIN:
                yield Unpin(ForkId(*numbers))
            case _Word.FENCE:
                lost = _rest(data, at, 8 * numbers[0])
                at += len(lost)
                workers = set(struct.unpack(f"<{numbers[0]}Q", lost))
                if not all(map(is_worker_id, workers)):
                    raise ValueError("a fence names what is no worker")
                yield Fence(tuple(workers))
            case _Word.FENCED:
                yield Fenced(*numbers)
            case _Word.GONE:
                text = _rest(data, at, numbers[2])
                at += len(text)
                yield Gone(ForkId(*numbers[:2]), in_few_words(text.decode(errors="replace")))


def _transfer(numbers: tuple[int, ...]) -> Transfer:
    return Transfer(ReferenceId(*numbers[:3]), ForkId(*numbers[3:5]))


def _rest(data: bytes, at: int, size: int) -> bytes:
    if len(data) - at < size:
        raise ValueError("a message of the reference protocol is longer than what came")
    return data[at : at + size]
