"""Who a worker is to the others: a name and a number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from telegrad.rpc.errors import InvalidWorker

MAX_WORKER_ID = 0xFFFF
_MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9\-_:.]*")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Name and id (rank) of a worker. Equal if both are equal; can be sent anywhere.

    >>> WorkerInfo("trainer", 0)
    WorkerInfo(id=0, name=trainer)
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidWorker(f"Worker name must be a string, but got {self.name!r}.")
        if not self.name:
            raise InvalidWorker("Worker name must be non-empty.")
        if len(self.name) >= _MAX_NAME:
            raise InvalidWorker(
                f"Worker name must be shorter than {_MAX_NAME} characters, "
                f"but {self.name[:20]!r}... has {len(self.name)}."
            )
        if not _NAME.fullmatch(self.name):
            raise InvalidWorker(
                f"Worker name must match {_NAME.pattern} (letters, digits, '-', '_', ':', '.'), "
                f"but got {self.name!r}."
            )
        if not isinstance(self.id, int):
            raise InvalidWorker(
                f"Worker id must be a whole number, but {self.name!r} has {self.id!r}."
            )
        if not 0 <= self.id <= MAX_WORKER_ID:
            raise InvalidWorker(
                f"Worker id must be in 0..{MAX_WORKER_ID}, but {self.name!r} has {self.id}."
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def is_worker_id(number: object) -> bool:
    """Whether a worker may have that id; what others send as one may be anything."""
    return type(number) is int and 0 <= number <= MAX_WORKER_ID
