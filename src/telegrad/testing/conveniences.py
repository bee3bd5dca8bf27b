"""What programs and tests that run in a simulation say besides their calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from telegrad.rpc.arguments import check_whole
from telegrad.rpc.current import current_node


def seeds(count: int, first: int = 0) -> Iterator[int]:
    """The seeds to try: `count` of them from `first` on.

    `TELEGRAD_SEEDS` in the environment asks for another count (for long runs), `TELEGRAD_SEED` for
    a single seed (to replay one).

    >>> list(seeds(3))
    [0, 1, 2]
    """
    check_whole("count", count, least=1)
    check_whole("first", first)
    only = _number_from("TELEGRAD_SEED")
    if only is not None:
        return iter([only])
    asked = _number_from("TELEGRAD_SEEDS")
    if asked is not None:
        # A test that tries no seed at all would pass.
        check_whole("TELEGRAD_SEEDS", asked, least=1)
        count = asked
    return iter(range(first, first + count))


def _number_from(variable: str) -> int | None:
    text = os.environ.get(variable)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(
            f"{variable}={text!r} is in the environment: give a whole number"
        ) from None


def now() -> float:
    """The time on the calling worker's clock: virtual in a simulation."""
    return current_node().runtime.now()


def sleep(seconds: float) -> None:
    """Let time pass on the calling worker. In a simulation it costs none."""
    runtime = current_node().runtime
    until = runtime.now() + seconds
    changed = runtime.condition()
    with changed:
        while (left := until - runtime.now()) > 0:
            changed.wait(left)


def worker_globals() -> dict[str, Any]:
    """A dict of the calling worker's own.

    Simulated workers share the variables of their modules, as they share a process. What each has
    for itself in production (its model, its cache) goes here instead.
    """
    own: dict[str, Any] = current_node().services.setdefault("worker_globals", {})
    return own
