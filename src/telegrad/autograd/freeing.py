"""Frees large graphs that Python has walked, without recursion.

torch frees a graph node by node in a loop. A node that Python has looked at is another matter: it
owns its Python object once nobody else does, and frees it as it goes, and that object frees the
next node, and so on, each inside of the other. Some ten thousands of such nodes in a row overflow
the stack, and the process is gone.

So the Python objects of a large graph are kept, in segments. The first ones hang on the *tops*, the
nodes that no other leads to; each segment ends in nodes on which the next ones hang. What hangs on
a node lies below it, so nothing keeps itself. When a node with a segment goes, the segment is let
go of from the top downwards: each node that goes then finds the next one still held, and ends
there. A tensor in the midst of the graph may outlive the loss; then the rest of one segment, whose
objects nobody keeps any more, is freed by recursion, and the segments below it as ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

LARGE = 10_000
"""Nodes. A row of so many is freed by recursion without harm."""
SEGMENT = LARGE // 2

_KEY = "telegrad: the nodes below"


class _Below:
    """A segment: each node before those that it leads to."""

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
    anchors = [node for node, count in incoming.items() if not count]
    while anchors:
        anchor = anchors.pop()
        segment: list[Any] = []
        ready = [anchor]
        while ready:
            for child, _ in ready.pop().next_functions:
                if child in incoming:
                    incoming[child] -= 1
                    if not incoming[child]:
                        segment.append(child)
                        (ready if len(segment) < SEGMENT else anchors).append(child)
        if segment:
            anchor.metadata[_KEY] = _Below(segment)
