"""Stands for `torch.distributed.rpc.functions`."""

from collections.abc import Callable
from typing import Any, TypeVar

from telegrad.rpc.functions import async_execution as native_async_execution

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function whose result is a future: the call is answered by the future's value."""
    wrapper = native_async_execution(fn)
    # Packages ask for this attribute, as stock's own proxies do.
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper
