"""The gradients of leaves: added up beside `.grad`, and seen by every hook that expects them.

A pass captures the gradient of a leaf instead of accumulating it, so `.grad` is not touched. What
captures do not run is all that hangs on the *accumulator* of a leaf: its node hooks, the
post-accumulate-grad hooks, and hooks made in C++, which Python cannot see. The last matter for
one user only, DDP's reducer, and it needs a process group. So a leaf *accumulates for real* if it
has hooks that we can see, or if a process group exists.

For those leaves one engine call at the end of the pass accumulates the sum as plain training
would, with `.grad` set aside, and the result is moved from `.grad` into the context. A lock keeps
passes apart. Code outside telegrad that touches `.grad` of such a leaf at that moment is not kept
out; that is why other leaves do not go this way.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd import torch_private
from telegrad.autograd.nodes import compiled

grad_slots = threading.RLock()
"""Held by whoever puts something into `.grad` for a moment: passes here, steps of optimizers."""


def add(a: Tensor | None, b: Tensor) -> Tensor:
    """The sum of two gradients, either of which may be sparse and the first absent."""
    if a is None:
        return b
    if a.layout is not torch.strided and b.layout is torch.strided:
        a, b = b, a
    return a + b


def own_all(gradients: dict[Any, Tensor]) -> None:
    """Keep each gradient itself if nobody else holds it, else a copy: the optimizer may change it.

    As in torch's own accumulation, a gradient that fills its memory densely is kept as it is. One
    that belongs to several leaves (`a + b` gives both the same) is copied for each, as in torch's
    distributed autograd, so that none depends on who came first.
    """
    shared = _held_twice(gradients.values())
    owners, strided = torch_private.owners, torch.strided
    for leaf, gradient in gradients.items():
        if (
            id(gradient) in shared
            or owners(gradient) > 1
            or (
                gradient.layout is strided and not gradient.is_contiguous() and not _dense(gradient)
            )
        ):
            gradients[leaf] = gradient.clone()


_LAYOUT = attrgetter("layout")
_STRIDED = {torch.strided}


def _are_owned(gradients: Collection[Tensor]) -> bool:
    """Nearly always true, and told without a line of Python for each: none is shared, and each has
    its elements in a row."""
    return (
        len({*map(id, gradients)}) == len(gradients)
        and max(map(torch_private.owners, gradients)) == 1
        and {*map(_LAYOUT, gradients)} == _STRIDED
        and all(map(Tensor.is_contiguous, gradients))
    )


def apart_from_leaves(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients that stay as they are when leaves are changed in place: a backward formula may
    return what it has saved, the leaf itself or a view of it."""
    for each in gradients:
        if each is not None and (each.requires_grad or torch_private.shares_memory(each)):
            return [None if g is None else g.detach().clone() for g in gradients]
    return gradients


def _held_twice(gradients: Collection[Tensor]) -> set[int]:
    """The identities of the gradients that occur more than once."""
    seen: set[int] = set()
    twice: set[int] = set()
    for gradient in gradients:
        (twice if id(gradient) in seen else seen).add(id(gradient))
    return twice


def _dense(gradient: Tensor) -> bool:
    fills_storage = gradient.untyped_storage().nbytes() == gradient.nbytes
    return fills_storage and 0 not in gradient.stride()


class Gradients:
    """What one pass found on one worker: the gradient of each leaf.

    Until the pass has found all, leaves are known by their accumulators: to look up a tensor is a
    call of a Python function, and there may be thousands.
    """

    __slots__ = ("_by_node", "_found")

    def __init__(self) -> None:
        self._by_node: dict[Any, Tensor] = {}
        self._found: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._by_node) + len(self._found)

    def add(self, found: Iterable[tuple[Any, Tensor | None]], create_graph: bool = False) -> None:
        """Add to the gradients of leaves, which are given by their accumulators."""
        by_node = self._by_node
        for node, gradient in found:
            if gradient is None:
                continue
            known = by_node.get(node)
            if known is not None:
                with torch.set_grad_enabled(create_graph):
                    gradient = add(known, gradient)
            by_node[node] = gradient

    def add_each(
        self, leaves: Collection[Any], gradients: Sequence[Tensor | None], create_graph: bool
    ) -> None:
        """As `add`, for leaves of which none comes twice. There may be more gradients."""
        if not leaves:
            return
        found = zip(leaves, gradients, strict=False)
        if self._by_node:
            self.add(found, create_graph)
        else:
            self._by_node = {node: gradient for node, gradient in found if gradient is not None}

    def add_to(self, total: dict[Tensor, Tensor]) -> None:
        for leaf, gradient in self._found or self._leaves():
            total[leaf] = add(total.get(leaf), gradient)

    def add_by_identity(self, total: dict[int, Tensor]) -> None:
        """As `add_to`, where nobody else looks at the leaves meanwhile."""
        found = self._found or self._leaves()
        if not total:
            total.update({id(leaf): gradient for leaf, gradient in found})
            if len(total) == len(found):
                return
            total.clear()  # A leaf that has two accumulators comes twice.
        for leaf, gradient in found:
            known = total.get(id(leaf))
            total[id(leaf)] = gradient if known is None else add(known, gradient)

    def has(self, gradient: Tensor | None) -> bool:
        """Whether it is the very gradient of a leaf. After `settle`."""
        return any(each is gradient for _, each in self._found)

    def drop(self, leaves: Collection[int]) -> None:
        """Forget what was found for these leaves, given by identity. After `settle`."""
        self._found = [each for each in self._found if id(each[0]) not in leaves]

    def settle(self, create_graph: bool) -> None:
        """The pass has found all there is: make the sums its own, run what hangs on leaves."""
        by_node = self._by_node
        if not by_node:
            return
        if compiled is not None and not (create_graph or torch_private.process_group_exists()):
            found = compiled.settle(by_node)
            if found is not None:
                self._found, self._by_node = found, {}
                return
        if not (create_graph or _are_owned(by_node.values())):
            own_all(by_node)
        accumulators = accumulating_for_real(by_node)
        if accumulators:
            nodes = {node.variable: node for node in accumulators}
            sums = {leaf: by_node.pop(node) for leaf, node in nodes.items()}
            self._found = list(_accumulate(nodes, sums, create_graph).items())
        self._found += self._leaves()
        self._by_node = {}

    def _leaves(self) -> list[tuple[Tensor, Tensor]]:
        by_node = self._by_node
        return list(zip(map(torch_private.variable_of, by_node), by_node.values(), strict=True))


def accumulating_for_real(accumulators: Collection[Any]) -> list[Any]:
    """Those on which something hangs that must see a real accumulation."""
    if torch_private.process_group_exists():
        return list(accumulators)
    return torch_private.hooked_accumulators(accumulators)


def _accumulate(
    nodes: dict[Tensor, Any], sums: dict[Tensor, Tensor], create_graph: bool
) -> dict[Tensor, Tensor]:
    leaves = list(nodes)
    gradients = [sums.pop(leaf) for leaf in leaves]
    with grad_slots:
        aside = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            torch_private.accumulate(nodes.values(), gradients, create_graph=create_graph)
            found = {leaf: leaf.grad for leaf in leaves if leaf.grad is not None}
            # A reducer may keep its buckets in .grad and reuse them: what stays must be a copy.
            return {leaf: g if create_graph else g.clone() for leaf, g in found.items()}
        finally:
            for leaf, gradient in zip(leaves, aside, strict=True):
                leaf.grad = gradient
