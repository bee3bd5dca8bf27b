"""The processes that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.autograd.processes import four_workers


@pytest.fixture(scope="module")
def names() -> Iterator[list[str]]:
    """The names of four workers, each a process; the first is this one."""
    with four_workers() as names:
        yield names
