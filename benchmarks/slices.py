"""Peers that take turns every fraction of a second.

What is to be known is a difference: how much longer a step takes than the same step in one process.
The machine's own pace changes by more than that within seconds. So all that is compared is there at
the same time, in processes of its own, and runs in short slices, one after the other; a difference
is taken between slices of the same rounds. Processes of stock torch RPC keep looking for messages
when there are none, and would be measured with the others: they are stopped by a signal while they
have no slice. The others sleep by themselves.

What counts of a slice is its median. Of the slices of all rounds it is the lower quartile: what
disturbs a machine from outside only adds.

Of several processes that do the same, one may be a tenth slower than another for as long as it
lives: where its memory lies in the machine's is decided once. So all of them are started anew a few
times in a run.

One more thing would be measured: whether glibc gives memory that a step freed back to the kernel,
and then takes it again page by page, depends on where its blocks happen to lie. The same step in
one process took 5.5 or 8 ms by that alone. So all processes alike are told to keep their memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peers import sample

STARTS = 8
"""How often all processes are started anew in a run."""
WARM_UP = 3
"""Runs before a slice is measured: who had to wait finds its caches cold."""
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
_ANSWER = "slice: "


class Sliced:
    """A peer in processes of its own, which may have to be stopped while it has no slice."""

    def __init__(
        self,
        program: str,
        peer: str,
        *,
        stops: bool = False,
        environment: dict[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", program, "--serve", peer]
        # Stock torch warns of itself in every process.
        settings = {**os.environ, **KEEP_MEMORY, "PYTHONWARNINGS": "ignore", **(environment or {})}
        self.name = peer
        self._stops = stops
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=settings,
        )

    def await_ready(self) -> None:
        """Return when it has made all that it will run."""
        self._answer()
        self._pause()

    def run(self, case: str, seconds: float) -> list[float]:
        """Times of single runs of one case."""
        assert self._process.stdin is not None
        if self._stops:
            self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([case, seconds]) + "\n")
        self._process.stdin.flush()
        times: list[float] = self._answer()
        self._pause()
        return times

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.communicate()

    def _pause(self) -> None:
        if self._stops:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return json.loads(line.removeprefix(_ANSWER))
        raise RuntimeError(f"The processes of {self.name} ended with {self._process.wait()}.")


@contextlib.contextmanager
def started(peers: list[Sliced]) -> Iterator[None]:
    """All peers are ready in the block, and gone after it."""
    try:
        for peer in peers:
            peer.await_ready()
        yield
    finally:
        for peer in peers:
            peer.end()


def shares(rounds: int) -> list[range]:
    """The rounds of a run, by the processes that they are of."""
    starts = min(STARTS, rounds)
    edges = [rounds * start // starts for start in range(starts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def serve(works: dict[str, Callable[[], object]]) -> None:
    """In a peer: run what is asked for, until the one who asks is gone."""
    _say("ready")
    for line in sys.stdin:
        case, seconds = json.loads(line)
        _say(sample(works[case], seconds, WARM_UP))


def _say(answer: object) -> None:
    print(_ANSWER + json.dumps(answer), flush=True)
