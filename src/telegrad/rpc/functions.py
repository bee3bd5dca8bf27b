"""Functions that answer with a future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ASYNC_EXECUTION = "_telegrad_async_execution"
"""The attribute that marks them."""


def async_execution(function: F) -> F:
    """Mark a function whose result is a `torch.futures.Future`: the call is answered by its value.

    The thread that ran the function is free as soon as the future is returned. An `async def`
    function needs no mark.

        @rpc.functions.async_execution
        def add_later(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + 1)
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, ASYNC_EXECUTION, True)
    return wrapper  # type: ignore[return-value]


def is_async_execution(function: object) -> bool:
    return getattr(function, ASYNC_EXECUTION, False) is True
