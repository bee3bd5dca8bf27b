"""The walk over a worker's graph: which sources meet, and where the graph must be cut.

A *source* is what starts gradient on this worker: the roots of `backward`, or one send. A pass
resolves each source once, by gradients or by absence. What a source reaches ends in *leaves*
(whose gradients are wanted) and *recvs* (whose gradients leave for other workers).

`form_groups` walks every source once. Sources that share a node inside the graph, or a recv, form
a *group*: a node must run once, with its whole gradient, so they have to be run together. Leaves do
not join sources, for their gradients can be added up afterwards; except leaves with hooks, which
must be called once with the sum.

Most groups have one source and need nothing more: one plain engine call. A group that has to run
before all its sources are resolved is given *stages*. Each node gets a mask, one bit for each
source that reaches it. Nodes with equal masks become runnable together. An edge between different
masks, or into a leaf, is a *cut*: what flows over it may have to be kept while the rest waits.

The walk is the only part of a pass that spends Python on every node. Keep it lean: 0.25 us a node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from telegrad.autograd import torch_private
from telegrad.autograd.context import SendRecord
from telegrad.autograd.enclosed import EnclosedSend, Enclosure
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.freeing import LARGE, free_without_recursion
from telegrad.autograd.nodes import RecvNode, compiled, engine_thread

Edge = tuple[Any, int]

ROOTS = 0
"""The message id that stands for the roots; messages count from 1."""

with torch.enable_grad():
    LeafNode: Any = type(
        (torch.zeros(1, requires_grad=True) * 1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    )


class State(Enum):
    """What is known of a source."""

    PENDING = 0
    GRADIENT = 1
    ABSENT = 2


def edges_of(start: Any) -> Sequence[Edge]:
    """The edges that a source starts with."""
    edges: Sequence[Edge] = getattr(start, "next_functions", start)
    return edges


@dataclass(slots=True, eq=False)
class Source:
    """Roots, or one send, in one pass."""

    message: int
    start: Any
    """Its edges, or the node of a send, which leads to them."""
    record: SendRecord | EnclosedSend | None = None
    state: State = State.PENDING
    gradients: Sequence[Tensor | None] = ()
    bit: int = 1
    """Its own among the sources of its group."""
    group: int = 0
    """The place of its group. The number, as the group knows the source: a cycle of the two would
    keep activations until the garbage collector comes by."""

    @property
    def node(self) -> Node | None:
        """The node of a send. Roots have none, nor have sends from inside of a node."""
        return None if self.record is None else self.record.node

    @property
    def edges(self) -> Sequence[Edge]:
        return edges_of(self.start)

    def weighted_edges(self) -> list[tuple[Edge, Tensor]]:
        """Where the gradients of this source enter the graph."""
        if self.state is not State.GRADIENT:
            return []
        pairs = zip(self.edges, self.gradients, strict=True)
        return [(e, g) for e, g in pairs if g is not None and e[0] is not None]


@dataclass(slots=True, eq=False)
class Group:
    """Sources that must be run together, and what they reach."""

    sources: list[Source]
    leaves: dict[Any, None]
    recvs: list[Any]
    stages: Stages | None = None
    done: bool = False

    def mask_of(self, state: State) -> int:
        return sum(source.bit for source in self.sources if source.state is state)


@dataclass(slots=True, eq=False)
class Stages:
    """How a group runs while some of its sources are pending."""

    masks: dict[Any, int]
    levels: frozenset[int]
    cuts: dict[Any, list[tuple[int, Any, int]]]
    enclosing: dict[Any, int]
    """Nodes that enclose calls, with the newest of these."""
    hooked_leaves: bool
    gate: Tensor | None
    entered: int = 0
    """The sources whose gradients have gone into the engine."""
    absent: int = 0
    """The sources that were absent when the engine was last called."""
    ran: int = 0
    """A level has run, or never will, if it lies within these bits."""
    kept: dict[Edge, Tensor] = field(default_factory=dict)
    """What flowed over cuts into nodes that have not run."""
    handles: list[RemovableHandle] = field(default_factory=list)


_start_of = attrgetter("start")


def groups_of(sources: Collection[Source]) -> tuple[list[Group], int]:
    """As `form_groups`, without an object of Python for each node on the way; and the number of
    nodes, leaves included."""
    found, met, count = compiled.walk([*map(_start_of, sources)])
    groups: list[Group] = []
    for source, (leaves, recvs) in zip(sources, found, strict=True):
        source.group = len(groups)
        groups.append(Group([source], leaves, recvs))
    return _joined(groups, {}, met, {}) if met else groups, count


def form_groups(
    sources: Iterable[Source], enclosing: Mapping[Any, Enclosure] | None = None
) -> tuple[list[Group], dict[Any, int]]:
    """Group the sources that meet. Also all nodes, leaves included, each with the number of the
    source that found it: while that dictionary lives, the Python objects of nodes stay the same,
    and can be used as keys."""
    owner: dict[Any, int] = {}
    groups: list[Group] = []
    met: list[tuple[int, int, Any]] = []
    leaf_type, recv_type = LeafNode, RecvNode
    for k, source in enumerate(sources):
        leaves: dict[Any, None] = {}
        recvs: list[Any] = []
        groups.append(Group([source], leaves, recvs))
        source.group = k
        stack: list[Sequence[Edge]] = [source.edges]
        while stack:
            for node, _ in stack.pop():
                if node is None:
                    continue
                if node in owner:
                    if owner[node] != k:
                        met.append((k, owner[node], node))
                    continue
                owner[node] = k
                kind = type(node)
                if kind is leaf_type:
                    leaves[node] = None
                elif kind is recv_type:
                    recvs.append(node)
                else:
                    stack.append(node.next_functions)
    if met or enclosing:
        groups = _joined(groups, owner, met, enclosing or {})
    return groups, owner


def _joined(
    groups: list[Group],
    owner: dict[Any, int],
    met: list[tuple[int, int, Any]],
    enclosing: Mapping[Any, Enclosure],
) -> list[Group]:
    """The groups of one source each, put together where a source `met` what another had found, or
    where the rules for enclosures ask for it."""
    parent = list(range(len(groups)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for k, other, node in met:
        if type(node) is LeafNode and node not in enclosing:
            groups[k].leaves[node] = None
            if not torch_private.tensor_hooks(node.variable):
                continue
        parent[find(other)] = find(k)
    for leaf, enclosure in enclosing.items():
        if leaf in owner:
            found_by = owner[leaf]
            del groups[found_by].leaves[leaf]
            groups[found_by].recvs += enclosure.recvs
            owner.update(dict.fromkeys(enclosure.recvs, found_by))
            for k, group in enumerate(groups):
                (source,) = group.sources
                if source.message > enclosure.newest and source.node is not None:
                    parent[find(k)] = find(found_by)
    joined: dict[int, Group] = {}
    for k, group in enumerate(groups):
        into = joined.setdefault(find(k), group)
        if into is not group:
            into.sources += group.sources
            into.leaves.update(group.leaves)
            into.recvs += group.recvs
    for place, group in enumerate(joined.values()):
        for number, source in enumerate(group.sources):
            source.group, source.bit = place, 1 << number
    return list(joined.values())


def make_stages(group: Group, enclosing: Mapping[Any, Enclosure] | None = None) -> Stages:
    """Prepare a group to run before all its sources are resolved."""
    enclosing = enclosing or {}
    masks, children, nodes = _masks(group, enclosing)
    hooked = any(torch_private.tensor_hooks(leaf.variable) for leaf in group.leaves)
    everything = (1 << len(group.sources)) - 1
    # What needs all sources is never followed by a wait, so nothing that leaves it must be kept;
    # unless the leaves below it have hooks, which wait for a call of their own.
    last = -1 if hooked else everything
    cuts = {
        node: cut
        for node, edges in children.items()
        if masks[node] != last and (cut := _cut(edges, masks, masks[node], group.leaves))
    }
    levels = frozenset(mask for node, mask in masks.items() if node not in group.leaves)
    run_first(group.recvs)
    _lift_above_sends(len(group.sources) + len(nodes), children)
    if len(masks) > LARGE:
        free_without_recursion(masks)
    stages = Stages(masks, levels, cuts, nodes, hooked, _make_gate(group))
    group.stages = stages
    return stages


def _masks(
    group: Group, enclosing: Mapping[Any, Enclosure]
) -> tuple[dict[Any, int], dict[Any, Sequence[Edge]], dict[Any, int]]:
    """Which sources reach each node, in one sweep from the sources down.

    A node that encloses calls counts as reached by every source that was made later.
    """
    children: dict[Any, Sequence[Edge]] = {}
    incoming: dict[Any, int] = {}
    recv_type = RecvNode
    stack: list[Sequence[Edge]] = [source.edges for source in group.sources]
    while stack:
        for node, _ in stack.pop():
            if node is None:
                continue
            if node in incoming:
                incoming[node] += 1
                continue
            incoming[node] = 1
            if type(node) is not recv_type and node not in group.leaves:
                edges = children[node] = node.next_functions
                stack.append(edges)
    nodes = _enclosing_nodes(children, enclosing) if enclosing else {}
    masks: dict[Any, int] = {
        node: sum(s.bit for s in group.sources if s.message > newest)
        for node, newest in nodes.items()
    }
    ready = [(source.bit, source.edges) for source in group.sources]
    while ready:
        mask, edges = ready.pop()
        for node, _ in edges:
            if node is None:
                continue
            merged = masks[node] = masks.get(node, 0) | mask
            incoming[node] -= 1
            if not incoming[node] and node in children:
                ready.append((merged, children[node]))
    for leaf, enclosure in enclosing.items():
        if leaf in masks:
            masks.update(dict.fromkeys(enclosure.recvs, masks[leaf]))
    return masks, children, nodes


def _enclosing_nodes(
    children: dict[Any, Sequence[Edge]], enclosing: Mapping[Any, Enclosure]
) -> dict[Any, int]:
    return {
        node: enclosing[child].newest
        for node, edges in children.items()
        for child, _ in edges
        if child in enclosing
    }


def _cut(
    edges: Sequence[Edge], masks: dict[Any, int], mask: int, leaves: dict[Any, None]
) -> list[tuple[int, Any, int]]:
    return [
        (place, node, index)
        for place, (node, index) in enumerate(edges)
        if node is not None and (masks[node] != mask or node in leaves)
    ]


def run_first(recvs: Sequence[Any]) -> None:
    """Have the engine run these before all else that is ready: their gradients leave meanwhile."""
    for recv in recvs:
        torch_private.set_sequence_number(recv, torch_private.FIRST)


def _lift_above_sends(count: int, nodes: dict[Any, Sequence[Edge]]) -> None:
    """Sends wait in the order 1..n of the queue; every other node must come before them.

    Sequence numbers count per thread, so the nodes of a young thread begin with small ones.
    """
    lowest = count + 1
    for node in nodes:
        if torch_private.sequence_number(node) < lowest:
            torch_private.set_sequence_number(node, lowest)


class Gate(torch.autograd.Function):
    """Stands above every leaf of a group and runs last of all.

    A call that is suspended loses what its leaves have captured, so no leaf may be evaluated in
    it. The gate holds them back until it is known that the call will reach its end.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.count = len(leaves)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        running = engine_thread.running
        assert running is not None
        running.pass_gate()
        return (None,) * ctx.count


def _make_gate(group: Group) -> Tensor | None:
    if not group.leaves:
        return None
    with torch.enable_grad():
        gate: Tensor = Gate.apply(*[leaf.variable for leaf in group.leaves])  # type: ignore[no-untyped-call]
    assert gate.grad_fn is not None
    for leaf, (held, _) in zip(group.leaves, gate.grad_fn.next_functions, strict=True):
        if leaf is not held:
            raise AutogradError(
                f"A leaf of shape {tuple(leaf.variable.shape)} lost its place in the graph since "
                "the forward pass (was its .data or requires_grad changed?)."
            )
    torch_private.set_sequence_number(gate.grad_fn, 0)
    return gate
