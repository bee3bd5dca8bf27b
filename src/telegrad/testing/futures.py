"""Lets activities wait for torch's futures.

`torch.futures.Future.wait`, `wait_all` and what `then` returns wait inside of torch, where a thread
that has the baton would sleep with it. All of them come down to one method of torch's own class
below `torch.futures.Future`; here it gives the baton back first. Other threads notice nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from telegrad.testing.scheduler import Scheduler, current_activity

_Future: Any = torch.futures.Future.__mro__[1]
_wait_in_torch = _Future.wait
_schedulers: list[Scheduler] = []


def _wait(future: Any) -> Any:
    me = current_activity()
    if me is not None and not future.done() and _schedulers:
        scheduler = _schedulers[-1]
        waits = True
        future.add_done_callback(lambda _: scheduler.wake(me) if waits else None)
        try:
            scheduler.wait(lambda: "a torch.futures.Future")
        finally:
            waits = False
    return _wait_in_torch(future)


class futures_wait_in:
    """While this is entered, activities that wait for futures give the baton back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __enter__(self) -> None:
        _schedulers.append(self._scheduler)
        _Future.wait = _wait

    def __exit__(self, *exc: object) -> None:
        _schedulers.remove(self._scheduler)
        if not _schedulers:
            _Future.wait = _wait_in_torch
