"""Eight threads that call at once: `python -m benchmarks.threads`.

Only one thread of a process runs Python at a time. Eight that call and wait take turns, and whoever
is woken for its turn is woken on whichever core the system finds, the callee's as often as not. So
the same calls are timed twice, in turn: as the system places the caller's threads, and with all of
them kept on one core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from benchmarks.peers import Peer, Samples, compare
from benchmarks.rpc import CLIENTS, many_clients, nothing

ROUNDS = 6
ON_ONE_CORE = ", on one core"


def measure(peer: Peer) -> Samples:
    calls = f"{CLIENTS} threads, time per call"
    samples: Samples = {calls: [], calls + ON_ONE_CORE: []}

    def call() -> None:
        peer.rpc.rpc_sync("worker1", nothing)

    many_clients(call, 1)
    for _ in range(ROUNDS):
        for where in ("", ON_ONE_CORE):
            with _on_one_core(bool(where)):
                samples[calls + where] += many_clients(call, 1)
    return samples


@contextmanager
def _on_one_core(wanted: bool) -> Iterator[None]:
    """Keep all threads of this process on one core."""
    cores = os.sched_getaffinity(0)
    _place({min(cores)} if wanted else cores)
    try:
        yield
    finally:
        _place(cores)


def _place(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # It has ended meanwhile.
            os.sched_setaffinity(int(thread), cores)


if __name__ == "__main__":
    compare("benchmarks.threads", measure)
