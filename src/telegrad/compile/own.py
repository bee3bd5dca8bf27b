"""Calls of a compiled function to its own worker, through which gradients may flow.

Such a call cannot be differentiated like one to another worker: the backward pass would wait inside
of a graph node for what only its own thread can do. So its tensors do not travel. What is called is
`run_here`, with a number by which the arguments are found, and the graph that the function makes is
kept. In the backward pass the node runs that graph by itself, between `respond` and `collect`.

The function runs as every call does: once, on a thread that serves calls, until its deadline. It
sees copies of the tensors, and gives copies. Only calls that it makes itself, through which
gradients would flow, are refused: their gradients come when the engine of this worker waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, strided
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.context import Context, Scope
from telegrad.autograd.enclosed import looking_for_changes
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.nodes import RecvNode
from telegrad.autograd.plan import LeafNode
from telegrad.wire.layouts import layout_of

_waiting: dict[int, OwnCall] = {}
_numbers = itertools.count(1)


class OwnCall:
    """The arguments, the result and the graph of one call."""

    def __init__(
        self,
        where: str,
        run: Callable[[list[Tensor]], Any],
        context: Context,
        tensors: list[Tensor],
    ) -> None:
        self.where = where
        self.number = next(_numbers)
        self.result: Any = None
        self._run = run
        self._context = context
        self._arguments = tensors
        self._outputs: Sequence[Tensor] = ()
        self._gradients: dict[int, Tensor] = {}
        _waiting[self.number] = self

    def run(self) -> None:
        with looking_for_changes(Scope(self._context, True)):
            # A function may change what it is given, which it may not do with leaves.
            self.result = self._run([tensor.clone() for tensor in self._arguments])

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        _waiting.pop(self.number, None)

    def take(self, outputs: list[Tensor], is_anchor: Callable[[Tensor], bool]) -> list[Tensor]:
        """Keep the graph of the result; the same as plain tensors."""
        self.result = None
        self._outputs = outputs
        for node in self._nodes():
            leads_on = type(node) is RecvNode or (
                type(node) is LeafNode and is_anchor(node.variable)
            )
            if leads_on:
                raise AutogradError(
                    f"A compiled function calls {self.where}, its own worker, where a call is made "
                    "through which gradients would flow. Call the function itself, without rpc, or "
                    "make this call outside of the compiled function."
                )
        return [_copy(output.detach()) for output in outputs]

    @property
    def differentiable(self) -> list[int]:
        """The places of the outputs that need a gradient."""
        return [place for place, output in enumerate(self._outputs) if output.requires_grad]

    def _nodes(self) -> list[Any]:
        found: dict[Any, None] = {}
        stack = [output.grad_fn for output in self._outputs]
        for output in self._outputs:
            if output.grad_fn is None and output.requires_grad:
                stack.append(get_gradient_edge(output).node)
        while stack:
            node = stack.pop()
            if node is not None and node not in found:
                found[node] = None
                stack += [following for following, _ in node.next_functions]
        return list(found)

    # Backward.

    def fire(self, gradients: dict[int, Tensor]) -> None:
        # Compiled code uses their memory again.
        self._gradients = {place: gradient.clone() for place, gradient in gradients.items()}

    def differentiate(self, running: Any) -> dict[int, Tensor]:
        """The gradients of the arguments; those of other leaves go to the pass that runs."""
        gradients, self._gradients = self._gradients, {}
        roots: list[tuple[tuple[Any, int], Tensor]] = []
        for place, gradient in gradients.items():
            output = self._outputs[place]
            if output.requires_grad:
                edge = get_gradient_edge(output)
                roots.append(((edge.node, edge.output_nr), gradient))
        if not roots:
            return {}
        leaves = [node for node in self._nodes() if type(node) is LeafNode]
        found = running.run_aside(roots, leaves)
        places = {id(tensor): place for place, tensor in enumerate(self._arguments)}
        own: dict[int, Tensor] = {}
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            if id(leaf.variable) in places:
                own[places[id(leaf.variable)]] = gradient
            else:
                running.gradients.add([(leaf, gradient)])
        return own


def _copy(tensor: Tensor) -> Tensor:
    """As it would arrive from another worker: elements that share memory still do."""
    copy = tensor.clone()
    if tensor.layout is not strided or copy.stride() == tensor.stride():
        return copy
    if layout_of(tensor).sparse:
        return copy
    extent = layout_of(tensor).extent // tensor.itemsize
    memory = tensor.as_strided((extent,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def run_here(number: int) -> None:
    """On the worker that calls itself: run what waits under a number."""
    _waiting.pop(number).run()
