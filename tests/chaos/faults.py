"""Faults that strike real processes while they work, each drawn from one seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from telegrad.wire.stream import Part, PlainStream

KINDS = {"none": 40, "kill": 4, "kill two": 1, "stop briefly": 8, "stop for long": 1}
LATEST = 0.04


@dataclass(frozen=True)
class Fault:
    """What strikes whom, how long after the step began, and for how long."""

    kind: str
    victims: tuple[str, ...] = ()
    after: float = 0.0
    lasts: float = 0.0


def draw(
    numbers: random.Random, workers: list[str], liveness: float, kinds: dict[str, int] = KINDS
) -> Fault:
    kind = numbers.choices(list(kinds), list(kinds.values()))[0]
    if kind == "none":
        return Fault(kind)
    victims = numbers.sample(workers, 2 if kind == "kill two" else 1)
    lasts = {"stop briefly": liveness * numbers.uniform(0.05, 0.4), "stop for long": 2 * liveness}
    return Fault(kind, tuple(victims), numbers.uniform(0, LATEST), lasts.get(kind, 0.0))


@dataclass
class Striker:
    """Carries faults out from a thread of its own, on the processes that it is told of."""

    pids: dict[str, int] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)

    def begin(self, fault: Fault) -> threading.Thread:
        thread = threading.Thread(target=self._strike, args=(fault,), daemon=True)
        thread.start()
        return thread

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "none":
            return
        time.sleep(fault.after)
        self.struck[fault.kind] += 1
        pids = [self.pids[victim] for victim in fault.victims]
        if fault.kind.startswith("kill"):
            self._signal(pids, signal.SIGKILL)
            return
        self._signal(pids, signal.SIGSTOP)
        time.sleep(fault.lasts)
        # One that was stopped for longer than the others wait is gone for them: it has to restart.
        self._signal(pids, signal.SIGCONT if fault.kind == "stop briefly" else signal.SIGKILL)

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


cuts = Counter[str]()
_send_all = PlainStream.try_send


def be_clumsy(seed: int, cut_chance: float, delay_chance: float) -> int:
    """From now on this process cuts connections at random bytes of what it sends, and dawdles."""
    numbers = random.Random(seed)

    def send_some(self: PlainStream, parts: Any) -> int:
        luck = numbers.random()
        if luck < delay_chance:
            cuts["delays"] += 1
            time.sleep(numbers.uniform(0, 0.02))
        if luck < 1 - cut_chance:
            return _send_all(self, parts)
        cuts["connection cuts"] += 1
        first: Part = parts[0]
        view = memoryview(first).cast("B")
        with contextlib.suppress(OSError):
            _send_all(self, [view[: numbers.randrange(len(view) + 1)]])
        self.close()
        raise ConnectionResetError("cut by the test")

    PlainStream.try_send = send_some  # type: ignore[method-assign]
    return os.getpid()


def be_careful() -> dict[str, int]:
    """As before; and what this process did."""
    PlainStream.try_send = _send_all  # type: ignore[method-assign]
    return dict(cuts)
