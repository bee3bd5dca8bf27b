"""What calls need of torch beyond its public interface. Each function says what it relies on."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from telegrad.rpc.calls import afresh, without_frames


def fail_future(future: torch.futures.Future[Any], error: BaseException) -> None:
    """As `future.set_exception`, but each who asks is given a copy of the error.

    `set_exception` raises the one error that the future keeps. The error then holds the frames that
    it passed, and they the future, which lives outside of Python: no collector would find the ring.
    Relies on `torch._C.Future._set_unwrap_func`, which `set_exception` itself is made of.
    """
    future._set_unwrap_func(_raise_copy)
    future.set_result(without_frames(error))


def _raise_copy(error: BaseException) -> NoReturn:
    raise afresh(error)
