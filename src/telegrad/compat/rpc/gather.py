"""What `_all_gather` remembers between its messages.

Every worker of a group sends its object to the *leader*, the one with the smallest name, which
sends them all back to each. Gatherings of the same workers are told apart by counting. A worker
that is lost never comes: a leader that waits for it fails the gathering and tells the others, and
who waits for a leader that is lost gives up.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any


class AllGatherStates:
    """One gathering as one worker sees it."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.awaited: set[str] = set()
        self.problem: str | None = None


class Gatherings:
    """The gatherings under way on this worker."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._begun: dict[str, int] = {}
        self._states: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)
        self._lost: dict[str, str] = {}

    def begin(self, names: Iterable[str]) -> str:
        """A name for the next gathering of these workers, the same on each of them."""
        group = "".join(sorted(names))
        with self._lock:
            number = self._begun.get(group, 0)
            self._begun[group] = number + 1
        return f"{group}{number}"

    def wait(self, gathering: str, names: set[str], patience: float | None) -> dict[str, Any]:
        """The objects that have come in when all are there, or when patience ends."""
        with self._lock:
            state = self._states[gathering]
            state.awaited = set(names)
            for name, reason in self._lost.items():
                _give_up(state, name, reason)
        state.proceed_signal.wait(patience)
        if state.problem is not None:
            raise RuntimeError(state.problem)
        return state.gathered_objects

    def fail(self, gathering: str, problem: str) -> None:
        """At a follower: the leader gave up."""
        with self._lock:
            state = self._states[gathering]
            state.problem = problem
            state.proceed_signal.set()

    def lose(self, name: str, reason: str) -> None:
        """A worker is gone."""
        with self._lock:
            self._lost[name] = reason
            for state in self._states.values():
                _give_up(state, name, reason)

    def add(self, gathering: str, name: str, obj: object, expected: set[str]) -> None:
        """At the leader: an object came in."""
        with self._lock:
            state = self._states[gathering]
            if name in state.gathered_objects:
                raise RuntimeError(f"worker {name!r} came to the gathering {gathering!r} twice")
            state.gathered_objects[name] = obj
            if expected == state.gathered_objects.keys():
                state.proceed_signal.set()

    def finish(self, gathering: str, objects: dict[str, Any]) -> None:
        """At a follower: all objects came in."""
        with self._lock:
            state = self._states[gathering]
            if state.proceed_signal.is_set():
                raise RuntimeError(f"the gathering {gathering!r} was ended twice")
            state.gathered_objects = objects
            state.proceed_signal.set()

    def end(self, gathering: str) -> dict[str, Any]:
        with self._lock:
            return self._states.pop(gathering).gathered_objects

    def clear(self) -> None:
        with self._lock:
            self._begun.clear()
            self._states.clear()
            self._lost.clear()


def _give_up(state: AllGatherStates, name: str, reason: str) -> None:
    if name in state.awaited - state.gathered_objects.keys() and not state.proceed_signal.is_set():
        state.problem = f"worker {name!r} is gone ({reason}): it will not come to the gathering"
        state.proceed_signal.set()
