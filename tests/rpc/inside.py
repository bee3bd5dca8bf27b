"""What tests have their processes do: make a call, and look inside of the worker."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from tests.rpc import functions


def call(to: Any, function: Any, *args: Any, **options: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args, **options)


def begin_call(to: str, function: Any, *args: Any, **options: Any) -> None:
    functions.kept = rpc.rpc_async(to, function, args=args, **options)


def hold_remote(to: str) -> None:
    functions.kept = rpc.remote(to, torch.ones, args=(2,))
    functions.kept.to_here()


def outcome_of_begun() -> Any:
    return functions.kept.wait()


def agent() -> Agent:
    transport = current_node().transport
    assert isinstance(transport, Agent)
    return transport


def references() -> dict[str, int]:
    return dict(rpc.debug_info()["references"])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_files() -> list[str]:
    """What the descriptors of this process refer to."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The one that lists them.
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(files)


def when_settled(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it is so once. A second look could see something else: descriptors come and go."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
