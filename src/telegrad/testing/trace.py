"""What happened in a simulated run, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Event(NamedTuple):
    """One step: at which virtual time, what, on which worker, about what."""

    time: float
    what: str
    worker: str
    about: str

    def __str__(self) -> str:
        return f"{self.time:10.4f}  {self.worker:<8} {self.what:<10} {self.about}"


def render(events: Iterable[Event]) -> str:
    return "\n".join(f"  {event}" for event in events)
