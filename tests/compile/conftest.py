"""The job that the tests of this room share: this process and two workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import telegrad
from telegrad import rpc
from tests.compile.functions import take_log


@pytest.fixture(scope="module")
def _job() -> Iterator[None]:
    started, done = threading.Event(), threading.Event()

    def main() -> None:
        started.set()
        done.wait()

    thread = threading.Thread(target=lambda: telegrad.run(main, workers=2))
    thread.start()
    assert started.wait(60)
    yield
    done.set()
    thread.join(30)


@pytest.fixture
def job(_job: None) -> None:
    """This process is the worker "main"; beside it are "worker1" and "worker2"."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, take_log)
