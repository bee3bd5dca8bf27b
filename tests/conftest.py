"""What all tests share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Tests run beside each other and start processes of their own: one thread each is what is left.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more of what else the machine does than of what is tested.
settings.register_profile("telegrad", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("telegrad")


@pytest.fixture(scope="session", autouse=True)
def _runtime_directory() -> Iterator[None]:
    """Jobs that are killed leave their sockets behind: in a place that goes with the tests."""
    with (
        tempfile.TemporaryDirectory(prefix="tg-") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


# A runner that was started in the background ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
