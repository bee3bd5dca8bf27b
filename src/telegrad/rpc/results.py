"""What a function gave back: a value, or something that will become one."""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import Any

import torch

from telegrad.rpc.coroutines import Coroutines
from telegrad.rpc.functions import ASYNC_EXECUTION

Finish = Callable[[object, "BaseException | None"], None]


class Later:
    """A result that is not there yet: `subscribe` is given a function to call with it."""

    __slots__ = ("subscribe",)

    def __init__(self, subscribe: Callable[[Finish], None]) -> None:
        self.subscribe = subscribe


def as_result(coroutines: Coroutines, target: object, result: Any) -> Any:
    """The result itself, or a `Later` for a coroutine or for the future of an async function."""
    if getattr(target, ASYNC_EXECUTION, False) is True:
        result = _from_future(target, result)
    elif type(result) is CoroutineType:
        result = Later(coroutines.start(result))
    return result


def _from_future(target: object, future: Any) -> Later:
    # What `then` gives is a future of the C++ class only.
    if not isinstance(future, torch._C.Future):
        if type(future) is CoroutineType:
            # It will not run: without this Python warns that it was never awaited.
            future.close()
        raise RuntimeError(
            # The beginning is torch's, whose name for the decorator is not the one in use.
            "Functions decorated with @rpc.async_function must return a torch.futures.Future "
            f"object, but {target!r}, which has @rpc.functions.async_execution, returned "
            f"{type(future).__name__}. Return the future itself, or drop the decorator: an "
            "`async def` function needs none."
        )

    def subscribe(finish: Finish) -> None:
        def done(settled: torch.futures.Future[Any]) -> None:
            try:
                value = settled.value()
            except BaseException as error:
                finish(None, error)
            else:
                finish(value, None)

        future.add_done_callback(done)

    return Later(subscribe)
