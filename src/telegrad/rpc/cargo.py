"""How many bytes of arguments are on their way to, or in the hands of, one other worker.

A callee that is slow holds the arguments of every call that it has not answered, so a caller that
does not wait could fill its memory. Each caller therefore has no more than `MOST` bytes of
arguments in calls that are not settled, or what the limits of the job allow (`bytes_in_flight`), if
that is less; who wants to send more waits until others have ended. One
call may be larger, but then it goes alone. Calls with next to no arguments are not weighed: their
number is bounded anyway.
"""

from __future__ import annotations

from collections.abc import Container
from operator import attrgetter
from threading import Lock

from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame

MOST = 256 << 20
LIGHT = 1 << 12
MANY = 1 << 10
_nbytes_of = attrgetter("nbytes")


def weigh(packed: Packed) -> int:
    """The bytes of a message that is worth weighing, else 0."""
    size = len(packed.meta) + sum(map(_nbytes_of, packed.buffers))
    return size if size >= LIGHT else 0


def weigh_arrived(frame: Frame) -> int:
    """The same of a message that came."""
    size = len(frame.meta) + sum(map(len, frame.buffers))
    return size if size >= LIGHT else 0


class Cargo:
    """`opened` has the numbers of the calls that are not settled; the callee takes `allowed`."""

    def __init__(self, opened: Container[int], allowed: int) -> None:
        self._open = opened
        self._allowed = allowed
        self._lock = Lock()
        self._loads: dict[int, int] = {}
        self._weight = 0

    def load(self, call_id: int, size: int) -> bool:
        """Take a call along. False: it has to wait."""
        most = min(MOST, self._allowed)
        with self._lock:
            if self._weight + size > most or len(self._loads) > MANY:
                self._unload()
                if self._weight and self._weight + size > most:
                    return False
            self._loads[call_id] = size
            self._weight += size
            return True

    def force(self, call_id: int, size: int) -> None:
        with self._lock:
            self._loads[call_id] = size
            self._weight += size

    def _unload(self) -> None:
        for call_id in [call_id for call_id in self._loads if call_id not in self._open]:
            self._weight -= self._loads.pop(call_id)
