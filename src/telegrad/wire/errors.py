"""What the codec raises: sentences for whoever called it."""

from __future__ import annotations


class CodecError(ValueError):
    """A message that arrived is malformed, passes a limit, or holds what is not accepted here."""


class Unpackable(TypeError):
    """A value cannot travel. `path` says where it sits in what was to be sent."""

    def __init__(self, path: str, kind: str, reason: str) -> None:
        super().__init__(path, kind, reason)
        self.path = path
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot send {self.path} (of type {self.kind}): {self.reason}"


class Refusal(Exception):
    """Raised while packing, deep in the tree; `pack` finds the path and raises `Unpackable`."""

    def __init__(self, culprit: object, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.reason = reason
