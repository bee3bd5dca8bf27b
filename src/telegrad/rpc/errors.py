"""Every error that telegrad's calls raise by themselves.

All derive from `TelegradError`, which is a `RuntimeError`: code written for torch RPC catches it.
Errors raised by a remote *function* keep their own type; these are for what telegrad has to say.
"""

from __future__ import annotations

from typing import Self

from telegrad.wire.errors import CodecError as CodecError
from telegrad.wire.errors import TelegradError as TelegradError
from telegrad.wire.errors import Unpackable as Unpackable


class NotInitialized(TelegradError):
    """A call was made before `init_rpc`, or after `shutdown`."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message
            or "RPC has not been initialized. Current RPC agent is not set! Did you initialize "
            "the RPC framework? Call telegrad.rpc.init_rpc(...) first."
        )


class RendezvousError(TelegradError):
    """The workers of a job could not agree on who they are."""


class InvalidWorker(TelegradError, ValueError):
    """A name or id that no worker can have."""


class UnknownWorker(TelegradError):
    """A call names a worker that is not in the job."""


class CallTimeout(TelegradError, TimeoutError):
    """A call did not end in its time."""


class Refused(TelegradError):
    """The other worker does not do what was asked of it: not for this one, or not now."""


class WorkerLost(TelegradError, ConnectionError):
    """A worker that an operation depended on is gone. Whatever fails for that reason is one.

    `worker` is its name, `cause` why it counts as gone, `pending` what waited for it.
    """

    worker = ""
    cause = ""
    pending = ""

    @classmethod
    def of(cls, worker: str, cause: str, pending: str = "") -> Self:
        waited = f" Pending was {pending}." if pending else ""
        return cls.saying(f"Worker {worker!r} is gone: {cause}.{waited}", worker, cause, pending)

    @classmethod
    def saying(cls, text: str, worker: str, cause: str, pending: str = "") -> Self:
        # Not by `__init__`, whose arguments are all that an error is rebuilt from elsewhere.
        error = cls(text)
        error.worker, error.cause, error.pending = worker, cause, pending
        return error


class NoRoom(TelegradError):
    """This process has no descriptor or no memory left for what it is to do."""


class JobClosed(TelegradError):
    """This worker shut down while the operation was under way."""


class ReferenceLost(TelegradError):
    """The value behind a reference cannot be had any more."""


class LostWithWorker(ReferenceLost, WorkerLost):
    """The value behind a reference is gone because a worker is."""


class RemoteError(TelegradError):
    """A remote function failed with an error whose type cannot be rebuilt here."""


class RemoteTraceback(Exception):
    """The traceback of a remote error; it is the `__cause__` of the error that is raised here."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker {self.worker!r}:\n\n{self.text}"


def in_few_words(text: str, most: int = 4000) -> str:
    """A text of another worker, without its middle if it is longer than that: it is kept, told on
    and shown, and may have been written to be a burden."""
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept:,} characters ...] {text[-kept:]}"
