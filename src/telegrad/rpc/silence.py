"""Who has fallen silent: a core without I/O.

Each worker asks the companions of its peers on other hosts again and again (`pulse.py`). A peer is
given up when nothing was heard of it for the *window*, or when its companion has said for as long
that it is stopped. In the first case others are asked before the window ends (`agreement.py`).
Anything that it sends on its links counts as a sign of life, too.

Time is counted only while we listen. A worker that computed for a minute without looking up, or was
stopped itself, has heard nothing meanwhile, and that says nothing about the others: between two
ticks no more than two intervals count.

A peer whose companion never answered is not judged here: between the two, datagrams may be barred.
What ends then is its connection, by the timeouts of TCP.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.rpc.pulse import Condition

NONCE = 16
QUESTIONS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this worker's companion, with this number."""

    worker: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This worker counts as lost; if it is only silent (not `certain`), others are to be asked."""

    worker: int
    reason: str
    certain: bool


@dataclass(slots=True)
class _Peer:
    quiet: float = 0.0
    stopped: float = 0.0
    has_answered: bool = False
    is_stopped: bool = False
    is_given_up: bool = False
    asked: deque[bytes] = field(default_factory=lambda: deque(maxlen=QUESTIONS_KEPT))


class Listening:
    """One worker's ear. `tick` is to be called once per interval, more or less."""

    def __init__(
        self,
        window: float,
        interval: float,
        inquiry: float = 0.0,
        draw: Callable[[], bytes] = lambda: secrets.token_bytes(NONCE),
    ) -> None:
        self._window = window
        self._interval = interval
        # So that all is over at the end of the window: the last tick, and what others are asked.
        self._patience = window - interval - inquiry
        self._draw = draw
        self._peers: dict[int, _Peer] = {}
        self._last: float | None = None

    def follow(self, worker: int) -> None:
        self._peers.setdefault(worker, _Peer())

    def forget(self, worker: int) -> None:
        self._peers.pop(worker, None)

    def heard(self, worker: int) -> None:
        """It sent something on a link: it runs."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.quiet = 0.0

    def answered(self, worker: int, nonce: bytes, condition: Condition) -> GiveUp | None:
        peer = self._peers.get(worker)
        if peer is None or peer.is_given_up or nonce not in peer.asked:
            return None
        peer.has_answered = True
        peer.quiet = 0.0
        peer.is_stopped = condition is Condition.STOPPED
        if not peer.is_stopped:
            peer.stopped = 0.0
        if condition is Condition.GONE:
            peer.is_given_up = True
            return GiveUp(worker, "its process has ended", certain=True)
        return None

    def tick(self, now: float) -> list[Ask | GiveUp]:
        passed = 0.0 if self._last is None else min(now - self._last, 2 * self._interval)
        self._last = now
        actions: list[Ask | GiveUp] = []
        for worker, peer in list(self._peers.items()):
            if peer.is_given_up:
                continue
            peer.quiet += passed
            peer.stopped += passed if peer.is_stopped else 0.0
            if peer.stopped >= self._window - self._interval:
                reason = f"its process has been stopped for {self._window:g} s"
                actions.append(GiveUp(worker, reason, certain=True))
                peer.is_given_up = True
            elif peer.has_answered and peer.quiet >= self._patience:
                reason = f"nothing has been heard from it for {self._window:g} s"
                actions.append(GiveUp(worker, reason, certain=False))
                peer.is_given_up = True
            else:
                nonce = self._draw()
                peer.asked.append(nonce)
                actions.append(Ask(worker, nonce))
        return actions

    def hears(self, worker: int) -> bool:
        """Whether the worker gave a sign of life just now."""
        peer = self._peers.get(worker)
        return peer is not None and peer.has_answered and peer.quiet < self._patience / 2

    def silent(self) -> set[int]:
        """Those that did answer and do not any more."""
        return {
            worker
            for worker, peer in self._peers.items()
            if peer.has_answered and peer.quiet >= self._patience / 2
        }
