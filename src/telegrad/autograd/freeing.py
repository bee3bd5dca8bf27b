"""Frees large graphs that Python has walked, without recursion.

torch frees a graph node by node in a loop. A node that Python has looked at is another matter: it
owns its Python object once nobody else does, and frees it as it goes, and that object frees the
next node, and so on, each inside of the other. Some ten thousands of such nodes in a row overflow
the stack, and the process is gone.

So the Python objects of a large graph are kept for as long as its *tops* live: the nodes that no
other leads to, hence not held by what is kept. With the last top they are let go of from the top
downwards. Each node that goes then finds the next one still held, and ends there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

LARGE = 10_000
"""Nodes. A row of so many is freed by recursion without harm."""

_KEY = "telegrad: the nodes below"


class _Below:
    """The nodes below the tops of one graph, each before those that it leads to."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    def __del__(self) -> None:
        nodes = self._nodes
        nodes.reverse()
        while nodes:
            nodes.pop()


def free_without_recursion(nodes: Collection[Any]) -> None:
    """For all nodes that one walk has seen."""
    incoming = dict.fromkeys(nodes, 0)
    for node in nodes:
        for child, _ in node.next_functions:
            if child in incoming:
                incoming[child] += 1
    tops = [node for node, count in incoming.items() if not count]
    ordered: list[Any] = []
    ready = list(tops)
    while ready:
        for child, _ in ready.pop().next_functions:
            if child in incoming:
                incoming[child] -= 1
                if not incoming[child]:
                    ordered.append(child)
                    ready.append(child)
    below = _Below(ordered)
    for top in tops:
        top.metadata[_KEY] = below
