"""What the codec raises: sentences for whoever called it."""

from __future__ import annotations


class TelegradError(RuntimeError):
    """Something that telegrad itself has to report: the root of all its errors."""


class CodecError(TelegradError, ValueError):
    """A message that arrived is malformed, passes a limit, or holds what is not accepted here."""


class Unpackable(TelegradError, TypeError):
    """A value cannot travel. `path` says where it sits in what was to be sent.

    `purpose` goes on from there: for which call, or of which.
    """

    def __init__(self, path: str, kind: str, reason: str, purpose: str = "") -> None:
        super().__init__(path, kind, reason, purpose)
        self.path = path
        self.kind = kind
        self.reason = reason
        self.purpose = purpose

    def __str__(self) -> str:
        return f"cannot send {self.path} (of type {self.kind}){self.purpose}: {self.reason}"

    def saying(self, path: str, purpose: str) -> Unpackable:
        return Unpackable(path, self.kind, self.reason, purpose)


class Refusal(Exception):
    """Raised while packing, deep in the tree; `pack` finds the path and raises `Unpackable`."""

    def __init__(self, culprit: object, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.reason = reason
