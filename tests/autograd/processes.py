"""Random programs over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from telegrad import rpc
from telegrad.autograd.messages import Mode
from tests.autograd.comparison import expectation, judge
from tests.autograd.conducted import compare, conduct, forget
from tests.autograd.machine import Boom
from tests.rpc.fleet import Nursery, join, serve_store

NAMES = ("main", "one", "two", "three")


@contextmanager
def four_workers() -> Iterator[list[str]]:
    """A job of four workers; this process is the first of them."""
    nursery = Nursery()
    store = serve_store()
    processes = [nursery.start() for _ in NAMES[1:]]
    for rank, process in enumerate(processes, start=1):
        process.begin(_serve, NAMES[rank], rank, store.port)
    join(NAMES[0], 0, len(NAMES), store.port)
    yield list(NAMES)
    rpc.shutdown(timeout=20)
    errors = [process.end() for process in processes]
    nursery.close()
    assert not [text for text in errors if "Traceback" in text]


def _serve(name: str, rank: int, port: int) -> None:
    join(name, rank, len(NAMES), port)
    rpc.shutdown()


def compare_over_processes(
    seed: int, features: frozenset[str], names: list[str], mode: Mode = Mode.SMART
) -> str:
    """Run one program on the workers of these names and compare it with one process."""
    expected = expectation(seed, features)
    try:
        found = conduct(expected, seed, features, tuple(names), mode)
    except (Boom, RuntimeError) as error:
        return judge(error, expected.error, mode)
    finally:
        for name in names[: expected.program.workers]:
            rpc.rpc_sync(name, forget, args=(seed,))
    compare(expected, found, features)
    return "equal"
