"""Errors that both kinds of handlers catch: stock's, and those that name the error's own class.

Of what a function raises, stock gives the caller of `rpc_sync` and `rpc_async` only `ValueError`
and `TypeError` as such. All else comes as a `RuntimeError`, and so does what user code has around
its calls: `except RuntimeError`. Telegrad gives the error itself. To serve both, an error gets a
class of the same name that descends from its own and from `RuntimeError`.

That class is made where it is needed and no module has it, so such an error travels as the class
that it was made of, and its parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from telegrad.rpc.failures import parts_of, put_together, sendable

_CAUGHT_ALREADY = (ValueError, TypeError, RuntimeError)


def as_runtime_error(error: Exception) -> Exception:
    """The error, or one with the same words and attributes that is a `RuntimeError` too."""
    if isinstance(error, _CAUGHT_ALREADY):
        return error
    return _put_together_as_both(type(error), *parts_of(error))


def _put_together_as_both(
    kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]
) -> Exception:
    return put_together(_with_runtime_error(kind), args, state)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _with_runtime_error(kind: type[Exception]) -> type[Exception]:
    def reduce(self: Exception) -> tuple[Any, ...]:
        args, state = parts_of(self)
        return _put_together_as_both, (kind, args, sendable(state))

    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": reduce}
    return type(kind.__name__, (kind, RuntimeError), body)
