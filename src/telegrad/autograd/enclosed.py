"""Calls that were made inside of one graph node, such as a compiled function.

A compiled function is one node of the autograd graph. The remote calls in it have no nodes of their
own: their sends and recvs are *enclosed*. When the engine runs the node, the code in it reports the
gradients of what arrived (`fire`) and waits for the gradients of what it sent (`take_enclosed`). It
cannot be suspended half-way, so three things hold for such a node in every pass:

* It is known by a leaf that it alone leads to, its *anchor*. The walk of the graph finds the
  anchor, and with it the enclosed recvs: a pass knows who must be told that nothing came.
* An enclosed send is a source without edges. Its gradients are kept for the node that waits.
* The node runs after every send that was made later. What a gradient depends on was made later
  than what it belongs to, so when the node waits, all that could bring the answer has run. Without
  this rule the node could wait for a gradient that another send on this worker holds up.

* A call of which the results lead to nothing that is differentiated has no part in the backward
  code. Nobody there will say so, and who waits for its gradient may be whom the node waits for. The
  code that made the call tells when it has let go of it (`forgotten`), and before the node waits,
  such calls are answered for.

Two threads that run compiled functions at the same moment may share an anchor. Then their calls
count as made by one node, which only delays what is said about them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.context import Context, Scope, speaking_for


@dataclass(frozen=True, slots=True, eq=False)
class EnclosedSend:
    """Tensors that left in one message from inside of a node."""

    message: int
    peer: int
    shapes: Sequence[tuple[torch.Size, torch.dtype]]
    node: None = None

    @property
    def start(self) -> tuple[tuple[None, int], ...]:
        return ((None, 0),) * len(self.shapes)


class Reads:
    """Tensors that the code in a node reads, and whose changes it would not see.

    A compiler is free to read a tensor once, before a call or after it. So what a remote function
    changes here by calling back, while the node waits for it, has to be noticed.
    """

    __slots__ = ("_tensors", "arguments")

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []
        self.arguments: Callable[[int], list[Tensor]] | None = None
        """The tensors that the code was given which a thread runs now."""

    def note(self, tensors: Iterable[Tensor]) -> None:
        known = {id(ref()) for ref in self._tensors}
        self._tensors += [weakref.ref(tensor) for tensor in tensors if id(tensor) not in known]

    def versions(self, thread: int) -> list[tuple[Tensor, int]]:
        """What is read by the code that a thread runs, as it is now."""
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        if self.arguments is not None:
            alive += self.arguments(thread)
        return [(tensor, tensor._version) for tensor in alive]


@dataclass(slots=True, eq=False)
class Enclosure:
    """All calls that one node has made in one context."""

    anchor: Tensor
    leaf: Any
    """The graph node by which the anchor is found."""
    newest: int = 0
    """Sends of this worker with a higher number were made after the calls of this node."""
    recvs: list[Any] = field(default_factory=list)
    calls: list[EnclosedCall] = field(default_factory=list)
    reads: Reads | None = None
    thread: int = 0
    """The one that runs the code in the node."""
    changed: Tensor | None = None
    """One of these that was changed while a call was under way."""

    def forgotten_recvs(self) -> list[Any]:
        """What arrived for calls of which the node will not speak again."""
        return [recv for call in self.calls if call.forgotten for recv in call.recvs]


class looking_for_changes(speaking_for):
    """As `speaking_for`, where nodes of this process have made calls in the context."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        super().__enter__()
        self._before = [
            (enclosure, enclosure.reads.versions(enclosure.thread))
            for enclosure in self._scope.context.enclosures
            if enclosure.reads is not None
        ]

    def __exit__(self, *error: object) -> None:
        for enclosure, versions in self._before:
            for tensor, version in versions:
                if tensor._version != version:
                    enclosure.changed = tensor
        super().__exit__(*error)


_making = threading.Lock()


def enclosure_of(context: Context, anchor: Tensor, leaf: Any = None) -> Enclosure:
    """The enclosure of the node that the anchor belongs to. `leaf` is the anchor's graph node, for
    those who know it."""
    with _making:
        for enclosure in reversed(context.enclosures):
            if enclosure.anchor is anchor:
                return enclosure
        enclosure = Enclosure(anchor, leaf or get_gradient_edge(anchor).node)
        context.enclosures.append(enclosure)
        return enclosure


class EnclosedCall:
    """One call from inside of a node. Stands for the context while the call is made."""

    def __init__(self, context: Context, anchor: Tensor, leaf: Any = None) -> None:
        self.context = context
        self.enclosure = enclosure_of(context, anchor, leaf)
        self.enclosure.calls.append(self)
        self.forgotten = False
        """The code that made the call has let go of it: no gradient of its results will come."""
        self.message: int | None = None
        """The send, if anything that left needs a gradient."""
        self.tensors: list[Tensor] = []
        """What left and needs a gradient, in the order of the gradients that come back."""
        self.recvs: list[Any] = []
        """The nodes of what arrived and needs a gradient."""

    @property
    def recording(self) -> Scope:
        return Scope(self.context, True, self)

    @property
    def silent(self) -> Scope:
        return Scope(self.context, False, self)

    def sent(self, message: int, tensors: list[Tensor]) -> None:
        self.message = message
        self.tensors = tensors
        self.enclosure.newest = max(self.enclosure.newest, message)

    def arrived(self, tensors: Iterable[Tensor]) -> None:
        self.recvs = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        self.enclosure.recvs += self.recvs


def leaves_of(enclosures: Iterable[Enclosure]) -> dict[Any, Enclosure]:
    """The enclosures by the leaf of their anchor."""
    return {enclosure.leaf: enclosure for enclosure in enclosures}
