"""Look for bytes for a short while before sleeping for them.

A thread that sleeps until its bytes come is woken late, and on a machine that put its core to rest
in the meantime it then runs several times slower than before: caches and branch predictors have to
learn everything anew. On a call that takes a tenth of a millisecond that is most of its time. So a
reader whose bytes came soon the last time looks for them again and again for a while, and sleeps
only then.

The rules that keep this from doing harm:
- Only for what comes soon. Each reader remembers how long its waits took, those for different
  things apart. What takes long is slept for at once, and what takes a while is slept for until
  shortly before it is expected: an idle link costs one look, one on which answers take long costs
  none, and while another process computes, its core and ours are free for most of the time.
- Looking yields to everyone: each look lets other threads have the interpreter, and then the core.
- One thread of a process looks, the one that asked last: who was just served is served next, as a
  rule. Two would take the interpreter from each other, and take that for a shared core.
- Who was kept from looking for longer than a look takes shares the core with somebody who needs
  it, or with many who look: nobody in this process looks for a while then, and for twice as long if
  it happens again before anything was found by looking. On a crowded machine nobody looks.
- Where more want to run than can take turns two by two, the system says so: who has been kept from
  looking need not try again to be sure, and who would sleep until shortly before its bytes come
  sleeps until they do. With 64 workers on two cores the looks of those that had nothing to do took
  more time than the calls.
- With one core there is nobody to wait for: who would send cannot run meanwhile.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Callable
from typing import ClassVar

LOOK_FOR = 0.01
"""Seconds. What a worker takes for its part of a step of training does not vary by more."""
LONG = 0.04
"""Seconds. For what takes longer nobody looks."""
WORTH_A_NAP = 0.002
NAP = 0.9
"""So much of the time that is expected is slept: what takes that long varies by a tenth."""
MOST_EXPECTED = 64
"""Kinds of waits that are told apart, before all are learnt anew."""
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
_RUNNABLE = "/proc/loadavg"
_MOST_RUNNABLE = 2 * (os.cpu_count() or 1)
"""Of the whole machine, which is what the system tells: as many as are not `CROWDED`."""


def looking_at(sock: socket.socket) -> Callable[[float | None], object]:
    """How to look for the bytes of a socket."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return poll.poll


def is_crowded() -> bool:
    """Whether so many want to run that nobody should who has nothing to do."""
    try:
        # Opened each time: that is rare, and a descriptor that is kept may be closed by others.
        with open(_RUNNABLE, "rb", buffering=0) as file:
            runnable = file.read(64).split(b"/", 1)[0].rsplit(b" ", 1)[-1]
        return int(runnable) > _MOST_RUNNABLE
    except (OSError, ValueError):
        return False


class Lookout:
    """The patience of one stream's reader."""

    __slots__ = ("_asked", "_awaited", "_expected", "_goes_on", "_look")

    _resting_until: ClassVar[float] = 0.0
    _rest: ClassVar[float] = REST_FOR
    _looks: ClassVar[int] = 0
    """Which one does, by its identity: what it looks at is not to be kept for that."""

    def __init__(self, look: Callable[[int], object]) -> None:
        """`look(milliseconds)` is true if there are bytes, or come in that time."""
        self._look = look
        self._asked = 0.0
        self._awaited = 0
        self._goes_on = False
        self._expected: dict[int, float] = {}

    def wait(self, awaited: int = 0, patience: float = math.inf) -> bool:
        """Before a read that blocks: return when there are bytes, or when it is time to sleep.

        True if there are bytes; else `ended` has to be told of the end of the read. `awaited` tells
        waits apart that take differently long. It takes no longer than `patience`.
        """
        if self._goes_on:
            return False
        self._asked = now = time.monotonic()
        self._awaited = awaited
        expected = self._expected.get(awaited, 0.0)
        if expected > LONG or now < Lookout._resting_until:
            return False
        look = self._look
        if look(0):
            self._note(0.0)
            return True
        if expected > WORTH_A_NAP:
            if is_crowded():
                return False
            if look(int(1000 * min(NAP * expected, patience))):
                self._note(time.monotonic() - self._asked)
                return True
            now = time.monotonic()
        until = now + min(LOOK_FOR, patience)
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
                    self._note(now - self._asked)
                    return True
            slow = slow + 1 if now - began > CROWDED else 0
            if slow == IN_A_ROW or (slow and is_crowded()):
                self._begin_rest(now)
                return False

    def _note(self, seconds: float) -> None:
        """It took so long this time. Sooner is believed at once: who sleeps too long is late."""
        expected = self._expected.get(self._awaited, math.inf)
        if expected == math.inf and len(self._expected) >= MOST_EXPECTED:
            self._expected.clear()
        if expected < seconds < LONG:
            seconds = expected + (seconds - expected) / 4
        self._expected[self._awaited] = seconds

    def _begin_rest(self, now: float) -> None:
        Lookout._resting_until = now + Lookout._rest
        Lookout._rest = min(2 * Lookout._rest, LONGEST_REST)

    def ended(self, came: bool) -> None:
        """After a read that had to wait. If nothing came, the next one is still the same wait."""
        self._goes_on = not came
        if came:
            self._note(time.monotonic() - self._asked if _SEVERAL_CORES else math.inf)


_SEVERAL_CORES = len(os.sched_getaffinity(0)) > 1
