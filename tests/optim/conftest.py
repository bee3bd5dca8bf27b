"""The workers that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nn.job import joined
from tests.rpc.fleet import Process


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Process]]:
    """This process is the worker "main" of a job; beside it are "worker1" and "worker2"."""
    yield from joined()
