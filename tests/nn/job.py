"""The job that the tests of `nn`, `optim` and `checkpoint` share: main, worker1 and worker2."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator

from telegrad import rpc
from tests.rpc.fleet import Nursery, Process, join, serve_store

NAMES = ("worker1", "worker2")


@functools.cache
def nursery() -> Nursery:
    made = Nursery("tests.nn.preload")
    atexit.register(made.close)
    return made


def _serve(name: str, rank: int, port: int) -> None:
    join(name, rank, len(NAMES) + 1, port)
    rpc.shutdown()


def joined() -> Iterator[dict[str, Process]]:
    """This process takes part as "main"; a job that it is part of already serves as well."""
    if rpc.is_initialized():
        yield {}
        return
    store = serve_store()
    processes = {name: nursery().start() for name in NAMES}
    for rank, (name, process) in enumerate(processes.items(), 1):
        process.begin(_serve, name, rank, store.port)
    join("main", 0, len(NAMES) + 1, store.port)
    yield processes
    rpc.shutdown(timeout=20)
    for process in processes.values():
        assert "Traceback" not in process.end(), process.errors
