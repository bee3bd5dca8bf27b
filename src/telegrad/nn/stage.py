"""One stage of a pipeline, on its worker: micro-batches pass through it in order, one at a time.

A worker that computed on all micro-batches at once would finish them all late, and the next stage
would idle meanwhile. So each waits for its turn. Inputs are fetched before: while one micro-batch
is computed, the next one's activation is on its way.

A *run* is one batch on its way through the pipeline. Turns of a run that failed are not all taken;
the next run begins anew, and what still comes of an older run no longer waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from telegrad.nn.ambient import Ambient
from telegrad.nn.hosted import HostedModule
from telegrad.rpc import RRef
from telegrad.rpc.current import current_node


@dataclass(frozen=True, slots=True)
class Turn:
    """Which micro-batch of which run."""

    run: int
    number: int


class Turns:
    """Lets the micro-batches of a run pass in order."""

    def __init__(self) -> None:
        self._changed = current_node().runtime.condition()
        self._run = -1
        self._next = 0
        self._over: set[int] = set()

    @contextmanager
    def taken(self, turn: Turn) -> Iterator[None]:
        """Wait for the turn; it is over with the block."""
        try:
            with self._changed:
                self._enter(turn.run)
                while self._run == turn.run and self._next < turn.number:
                    self._changed.wait()
            yield
        finally:
            self.pass_on(turn)

    def pass_on(self, turn: Turn) -> None:
        """The turn is over, or will not be taken."""
        with self._changed:
            self._enter(turn.run)
            if self._run == turn.run:
                self._over.add(turn.number)
                while self._next in self._over:
                    self._over.remove(self._next)
                    self._next += 1
            self._changed.notify_all()

    def _enter(self, run: int) -> None:
        if run > self._run:
            self._run, self._next = run, 0
            self._over.clear()
            self._changed.notify_all()


class HostedStage:
    """A module that takes micro-batches in turn."""

    def __init__(self, hosted: HostedModule) -> None:
        self._hosted = hosted
        self._turns = Turns()

    def forward(
        self, turn: Turn, around: Ambient | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            args, kwargs = self._hosted.prepared(args), self._hosted.prepared(kwargs)
        except BaseException:
            self._turns.pass_on(turn)
            raise
        with self._turns.taken(turn):
            return self._hosted.compute(around, args, kwargs)


def make_stage(module: RRef[HostedModule]) -> RRef[HostedStage]:
    """On the worker of a module: make a stage of it."""
    return RRef(HostedStage(module.local_value()))
