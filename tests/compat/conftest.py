"""Torch's modules on telegrad, in this process and with one worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from telegrad import compat


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    try:
        yield
    finally:
        compat.uninstall()


@pytest.fixture
def alone(installed: None, tmp_path: Path) -> Iterator[ModuleType]:
    """`torch.distributed.rpc` in a job of one worker, named `me`."""
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        yield rpc
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()
