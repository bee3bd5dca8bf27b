"""Look for bytes for a short while before sleeping for them.

A thread that sleeps until its bytes come is woken late, and on a machine that put its core to rest
in the meantime it then runs several times slower than before: caches and branch predictors have to
learn everything anew. On a call that takes a tenth of a millisecond that is most of its time. So a
reader whose bytes came soon the last time looks for them again and again for a while, and sleeps
only then.

The rules that keep this from doing harm:
- Only who was served soon looks. A wait that took longer turns looking off, and it stays off until
  bytes have come soon after the reader asked: an idle link costs one look, a link on which answers
  take long costs none.
- Looking yields to everyone: each look lets other threads have the interpreter, and then the core.
- One thread of a process looks, the one that asked last: who was just served is served next, as a
  rule. Two would take the interpreter from each other, and take that for a shared core.
- Who was kept from looking for longer than a look takes shares the core with somebody who needs
  it, or with many who look: nobody in this process looks for a while then, and for twice as long if
  it happens again before anything was found by looking. On a crowded machine nobody looks.
- With one core there is nobody to wait for: who would send cannot run meanwhile.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import ClassVar

LOOK_FOR = 0.01
"""Seconds. About what a worker takes for its part of a step of training, in the backward pass."""
KEPT_AWAY = 0.001
"""Seconds. Somebody who needs the core has it for longer; a machine that is shared from outside
takes it away for less, and often."""
LOOKS = 16
CROWDED = LOOKS * 0.000012
"""Seconds for so many looks in a row. Alone on its core a look takes some 3 us, and 8 if two take
turns."""
IN_A_ROW = 3
"""So often in a row looks are slow where many look. Once they are when a machine is disturbed."""
REST_FOR = 0.001
LONGEST_REST = 1.0


def looking_at(sock: socket.socket) -> Callable[[int], object]:
    """How to look for the bytes of a socket."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return poll.poll


class Lookout:
    """The patience of one stream's reader."""

    __slots__ = ("_asked", "_look", "_soon")

    _resting_until: ClassVar[float] = 0.0
    _rest: ClassVar[float] = REST_FOR
    _looks: ClassVar[int] = 0
    """Which one does, by its identity: what it looks at is not to be kept for that."""

    def __init__(self, look: Callable[[int], object]) -> None:
        """`look(0)` is true if there are bytes."""
        self._look = look
        self._soon = True
        self._asked = 0.0

    def wait(self) -> bool:
        """Before a read that blocks: return when there are bytes, or when it is time to sleep.

        True if there are bytes; else `came` has to be told of the end of the read.
        """
        self._asked = now = time.monotonic()
        if not self._soon or now < Lookout._resting_until:
            return False
        look, until = self._look, now + LOOK_FOR
        if look(0):
            return True
        Lookout._looks = me = id(self)
        slow = 0
        while True:
            began = now
            for _ in range(LOOKS):
                os.sched_yield()
                before, now = now, time.monotonic()
                if now > until or Lookout._looks != me:
                    return False
                if now - before > KEPT_AWAY:
                    self._begin_rest(now)
                    return False
                if look(0):
                    Lookout._rest = REST_FOR
                    return True
            slow = slow + 1 if now - began > CROWDED else 0
            if slow == IN_A_ROW:
                self._begin_rest(now)
                return False

    def _begin_rest(self, now: float) -> None:
        Lookout._resting_until = now + Lookout._rest
        Lookout._rest = min(2 * Lookout._rest, LONGEST_REST)

    def came(self) -> None:
        """After a read that had to wait."""
        self._soon = time.monotonic() - self._asked < LOOK_FOR and _SEVERAL_CORES


_SEVERAL_CORES = len(os.sched_getaffinity(0)) > 1
