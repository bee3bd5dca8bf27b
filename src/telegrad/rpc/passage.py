"""Between whom a message travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telegrad.rpc.node import Node


class Passage:
    """To or from whom a message goes; what codec extensions are told."""

    __slots__ = ("node", "worker")

    def __init__(self, node: Node, worker: int) -> None:
        self.node = node
        self.worker = worker


class Passages(dict[int, Passage]):
    """By worker, made when they are first asked for."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __missing__(self, worker: int) -> Passage:
        return self.setdefault(worker, Passage(self._node, worker))
