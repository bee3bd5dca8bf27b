"""What has no place inside of a compiled function says so, instead of a message of torch's about
whatever it met first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from telegrad.rpc.errors import TelegradError

P = ParamSpec("P")
T = TypeVar("T")


def refuse_in_graph(what: str) -> None:
    """For the first line of a function."""
    if is_dynamo_compiling():
        raise TelegradError(
            f"{what} cannot be a part of a graph: move this out of the compiled function."
        )


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """For functions that nobody calls often."""
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_in_graph(name)
        return function(*args, **kwargs)

    return checked
