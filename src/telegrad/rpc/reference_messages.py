"""What workers say to each other of references, and how that travels: as plain data.

`references.py` decides who says what, and has the words.
"""

from __future__ import annotations

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


# As plain data.


def read_reference(data: Any) -> ReferenceId:
    match data:
        case (int(owner), int(created_on), int(number)):
            return ReferenceId(owner, created_on, number)
    raise ValueError("a reference is named by three numbers")


def _fork(data: Any) -> ForkId:
    match data:
        case (int(created_on), int(number)):
            return ForkId(created_on, number)
    raise ValueError("a fork is named by two numbers")


def read_transfer(data: Any) -> Transfer:
    reference, fork = data
    return Transfer(read_reference(reference), _fork(fork))


def _transfer_data(transfer: Transfer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(transfer.reference), tuple(transfer.fork)


def as_data(message: Message) -> tuple[Any, ...]:
    """A message of the protocol as plain data."""
    match message:
        case Register(transfer, holder):
            return ("register", _transfer_data(transfer), holder)
        case Release(transfer):
            return ("release", _transfer_data(transfer))
        case Accepted(fork):
            return ("accepted", tuple(fork))
        case Unpin(fork):
            return ("unpin", tuple(fork))
        case Gone(fork, reason):
            return ("gone", tuple(fork), reason)
        case Fence(lost):
            return ("fence", lost)
        case Fenced(lost):
            return ("fenced", lost)


def read_message(data: Any) -> Message:
    match data:
        case ("register", transfer, int(holder)):
            return Register(read_transfer(transfer), holder)
        case ("release", transfer):
            return Release(read_transfer(transfer))
        case ("accepted", fork):
            return Accepted(_fork(fork))
        case ("unpin", fork):
            return Unpin(_fork(fork))
        case ("gone", fork, str(reason)):
            return Gone(_fork(fork), in_few_words(reason))
        case ("fence", [*lost]) if all(map(is_worker_id, lost)):
            return Fence(tuple(set(lost)))
        case ("fenced", int(lost)):
            return Fenced(lost)
    raise ValueError("what came is no message of the reference protocol")
