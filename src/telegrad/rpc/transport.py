"""What a node knows of its transport: an interface, and what goes through it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from telegrad.rpc.calls import Pending
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Kind


@dataclass(slots=True)
class Reply:
    """What goes back for a request."""

    kind: Kind
    packed: Packed
    note: bytes = b""


class Transport(Protocol):
    """How frames leave, and how a thread waits for one."""

    def call(self, pending: Pending, packed: Packed, note: bytes) -> None: ...
    def reply(self, to: int, call_id: int, reply: Reply) -> None: ...
    def post(self, to: int, packed: Packed, note: bytes) -> None: ...
    def wait(self, pending: Pending, until: float = math.inf) -> None:
        """Until the call is settled, or `until`. Its deadline settles a call."""
        ...

    def attend(self, pending: Pending) -> None:
        """Nobody may wait for this call: see to it that it is completed all the same."""
        ...

    def starting(self, function: object) -> None:
        """The calling thread is about to run a user function for a request."""
        ...

    def blocking(self) -> None:
        """The calling thread is about to wait for something that other requests may bring."""
        ...

    def knows(self, worker: int) -> bool:
        """Whether a message to that worker can leave without its being met first."""
        ...

    def nudge(self) -> None:
        """`Node.values` has deaths to bury: call `bury` soon. Safe in a garbage collection."""
        ...

    def lose(self, worker: int, reason: str) -> None:
        """Be done with a worker."""
        ...

    def told_of_loss(self, sender: int, worker: int) -> None:
        """One worker says that another is gone: be done with it, or with who says so."""
        ...
