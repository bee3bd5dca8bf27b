"""What happens to a worker's part of a pass, besides the messages of other workers."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.autograd.answer import Answer
from telegrad.autograd.context import RecvRecord
from telegrad.autograd.messages import Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """A message arrived for which this pass waits at its sender, too late to take part here."""

    record: RecvRecord


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A message that left here, or was to leave, never reached its worker."""

    message: int


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that a worker and this one had to say to each other was not taken."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Abandon:
    """The context is gone, or the pass is known to be over: stop, and tell nobody.

    Made for one participant: who leads the pass raises the error.
    """

    error: BaseException


@dataclass(frozen=True, slots=True)
class Stalled:
    """The initiator of a FAST pass has waited long."""


@dataclass(frozen=True, slots=True, eq=False)
class Stopped:
    """The caller of `backward` does not wait any more."""

    error: BaseException


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A message from the initiator, who waits for the answer."""

    message: Message
    answer: Answer


Event = Message | Asked | Lost | Missed | TakenBack | Unread | Abandon | Stalled | Stopped
