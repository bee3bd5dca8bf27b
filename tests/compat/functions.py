"""Functions that the tests call on a worker."""

from __future__ import annotations

import threading
from typing import Any

import torch

release = threading.Event()


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def fail(message: str) -> None:
    raise ValueError(message)


class Precise(Exception):
    """Cannot be made of a message alone."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def fail_with(error: Exception) -> None:
    raise error


class Unusual(LookupError):
    """An error of a user, with an attribute beside its words."""

    hint: str = ""


def fail_unusually() -> None:
    error = Unusual("nowhere")
    error.hint = "look elsewhere"
    raise error


def fail_precisely() -> None:
    raise Precise(7, "out of range")


def wait_for_release() -> str:
    release.wait(30)
    return "released"


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def increase(self, by: int = 1) -> int:
        self.value += by
        return self.value


def names_of(**kwargs: Any) -> list[str]:
    return sorted(kwargs)


class Named:
    def names_of(self, **kwargs: Any) -> list[str]:
        return sorted(kwargs)


class Failing:
    def fail_with(self, error: Exception) -> None:
        raise error

    def fail_precisely(self) -> None:
        fail_precisely()


class Picky(ValueError):
    """A class of a user below one that stock gives as such."""


def value_of(rref: Any) -> int:
    return int(rref.local_value().value)


async def add_two_later(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 2


class Wrapped:
    """Travels as its reducer says."""

    def __init__(self, value: Any) -> None:
        self.value = value


def unwrap(wrapped: Wrapped) -> Any:
    return wrapped.value


def rebuild_wrapped(value: Any) -> Wrapped:
    return Wrapped(("rebuilt", value))
