"""`torch.futures.wait_all` as C++ futures have it: the first error ends the wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.futures import Future


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """The values of all futures; the error of the first that fails, as soon as it does."""
    futures = _checked(futures)
    waiting = len(futures)
    failed: Future[Any] | None = None
    changed = threading.Condition()

    def settled(future: Future[Any]) -> None:
        nonlocal waiting, failed
        try:
            future.value()
        except BaseException:
            failure: Future[Any] | None = future
        else:
            failure = None
        with changed:
            waiting -= 1
            failed = failed or failure
            changed.notify()

    for future in futures:
        future.add_done_callback(settled)
    with changed:
        changed.wait_for(lambda: waiting == 0 or failed is not None)
    if failed is not None:
        failed.wait()
    return [future.wait() for future in futures]


def _checked(futures: Iterable[Any]) -> list[Future[Any]]:
    """A list of them: a generator gives them once."""
    checked = list(futures)
    for future in checked:
        # What `then` and torch.jit.fork give is of the C++ class only.
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"wait_all waits for futures, and got a {type(future).__name__}")
    return checked
