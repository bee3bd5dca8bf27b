"""Which functions take so long that the thread that reads should not run them.

One slow run may be an accident of a busy machine, so the memory is short: a slow run counts twice,
a quick one takes one off, and a function with a count of two or more is expected to be slow. On a
machine with more to do than cores a function may be kept from its core for longer than it runs:
that is no time of its own, unless it waits for something.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

QUICK = 0.0005
MOST = 8


@dataclass(frozen=True, slots=True)
class Run:
    """A function that has begun on the calling thread."""

    function: object
    started: float
    used: float
    waits: int

    @classmethod
    def of(cls, function: object) -> Run:
        return cls(function, time.monotonic(), time.thread_time(), _waits())

    def is_quick(self) -> bool:
        if time.monotonic() - self.started < QUICK:
            return True
        return time.thread_time() - self.used < QUICK and _waits() == self.waits


def _waits() -> int:
    """How often the calling thread has let go of its core in order to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class SlowFunctions:
    """Functions that ran for longer than a tick of the watch."""

    def __init__(self) -> None:
        self.counts: dict[object, int] = {}

    def knows(self, function: object) -> bool:
        """Whether the function has been slow lately: it is to be timed."""
        return _name(function) in self.counts

    def expects(self, function: object) -> bool:
        """Whether the function is expected to be slow."""
        return self.counts.get(_name(function), 0) >= 2

    def was_slow(self, function: object) -> None:
        name = _name(function)
        self.counts[name] = min(self.counts.get(name, 0) + 2, MOST)

    def ended(self, run: Run) -> None:
        """A function that is known here has ended."""
        if run.is_quick():
            name = _name(run.function)
            count = self.counts.get(name, 0)
            if count > 1:
                self.counts[name] = count - 1
            else:
                self.counts.pop(name, None)


def _name(function: object) -> object:
    """What stands for a function here: never its object, which must not be kept alive."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__qualname__", None) or type(function)
