"""The one hook through which autograd sees messages.

A message may carry a *note*: a few bytes that belong to the layer above. When nothing is recorded
(`current()` is None and the note is empty) a call pays nothing for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from telegrad.rpc.node import Node

Scope = Any


class Crossing(Protocol):
    """What happens to tensors as they cross between workers."""

    def current(self) -> Scope | None:
        """The scope under which the calling thread's calls leave."""
        ...

    def leaving(self, node: Node, to: int, tensors: list[Tensor], scope: Scope) -> bytes:
        """A message with these tensors leaves: record it, and say what travels with it."""
        ...

    def arriving(
        self, node: Node, sender: int, note: bytes, tensors: list[Tensor]
    ) -> tuple[list[Tensor], Scope | None]:
        """A message with a note arrived: what its tensors are from now on, and its scope."""
        ...

    def never_left(self, node: Node, to: int, note: bytes) -> None:
        """A message for which `leaving` gave this note will not leave."""
        ...

    def never_arrived(self, node: Node, sender: int, note: bytes) -> None:
        """A message with this note came, and was refused before its tensors could arrive."""
        ...

    def enter(self, node: Node, scope: Scope) -> AbstractContextManager[object]:
        """While a request that came under this scope runs."""
        ...


class NoCrossing:
    """Nothing is recorded."""

    def current(self) -> None:
        return None

    def leaving(self, node: Node, to: int, tensors: list[Tensor], scope: Scope) -> bytes:
        return b""

    def arriving(
        self, node: Node, sender: int, note: bytes, tensors: list[Tensor]
    ) -> tuple[list[Tensor], None]:
        return tensors, None

    def never_left(self, node: Node, to: int, note: bytes) -> None:
        return None

    def never_arrived(self, node: Node, sender: int, note: bytes) -> None:
        return None

    def enter(self, node: Node, scope: Scope) -> AbstractContextManager[object]:
        return nullcontext()
