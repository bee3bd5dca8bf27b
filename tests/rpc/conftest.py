"""The processes that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad import rpc
from tests.rpc.fleet import Job, Nursery, Process, join, serve_store


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Iterator[dict[str, Process]]:
    """This process is the worker "main" of a job; beside it are "worker1" and "worker2"."""
    store = serve_store()
    processes = {name: nursery.start() for name in ("worker1", "worker2")}
    for rank, (name, process) in enumerate(processes.items(), 1):
        process.begin(_serve, name, rank, store.port)
    join("main", 0, 3, store.port)
    yield processes
    rpc.shutdown(timeout=20)
    for process in processes.values():
        assert "Traceback" not in process.end(), process.errors


def _serve(name: str, rank: int, port: int) -> None:
    join(name, rank, 3, port)
    rpc.shutdown()


@pytest.fixture
def make_job(nursery: Nursery) -> Iterator[Callable[..., Job]]:
    """Jobs of which this process is no part; what the test leaves of them is killed."""
    jobs: list[Job] = []

    def make(*names: str, **options: Any) -> Job:
        jobs.append(Job(nursery, names, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.abandon()


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Callable[[], Process]]:
    """Processes that have joined nothing yet."""
    processes: list[Process] = []

    def start() -> Process:
        processes.append(nursery.start())
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
