"""What a user gave, looked at before anything is started.

A wrong number that is found later is found by torch, or by a process that has already been started,
in words that do not name what was written.
"""

from __future__ import annotations

import threading


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Refuse what is not a whole number, or not of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}: give a whole number of at least {least}")


def check_seconds(name: str, value: object) -> None:
    """Refuse what is not a time that can be waited for."""
    _check_number(name, value)
    # Not the other way around: a NaN is neither.
    if not 0 < value <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise ValueError(
            f"{name}={value}: give a number of seconds greater than 0 and at most "
            f"{threading.TIMEOUT_MAX:.0f}, which is the longest that a thread can wait"
        )


def check_bound(name: str, value: object) -> None:
    """Refuse what is neither a bound in seconds nor 0, which is none."""
    _check_number(name, value)
    if not value >= 0:  # type: ignore[operator]
        raise ValueError(f"{name}={value}: give a number of seconds, or 0 for no bound")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a number of seconds")
