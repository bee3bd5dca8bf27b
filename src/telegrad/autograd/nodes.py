"""The nodes at which the graph is cut, and what is asked of the graph around them.

* A *send* is one node over all tensors of a message that need gradient. Nothing uses its output: a
  backward pass starts from it with the gradients that come back.
* A *recv* is one node **per tensor**, not one per message. A node with several outputs runs when
  any of them has a gradient, and then torch calls the hooks of the others with None; in one process
  the hooks of an unused tensor are not called at all. The nodes of one message compare equal, so
  "did these tensors come together?" can still be asked of the graph.
* Where the engine runs for long, a recv runs before all else that is ready: its gradient leaves
  while local work goes on.

All of it is compiled (`_graph.cpp`) where telegrad was installed with a compiler and the headers of
the torch that runs. Otherwise it is what stands here, which does the same and takes longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad import native
from telegrad.autograd import torch_private
from telegrad.autograd.errors import AutogradError
from telegrad.rpc.current import find_node


class Running(Protocol):
    """What runs the engine on a thread, as its nodes see it."""

    def take(self, message: int) -> Sequence[Tensor | None]: ...

    def fire(self, message: int, index: int, gradient: Tensor | None) -> None: ...

    def pass_gate(self) -> None: ...


class _Thread(threading.local):
    running: Running | None = None


engine_thread = _Thread()

_TOKEN = torch.zeros(())
_ANCHOR = torch.zeros((), requires_grad=True)
"""The input of every recv: makes its output need gradient, and makes the engine run its node."""


def anchor() -> Tensor:
    return _ANCHOR


def _running(what: str, peer: int) -> Running:
    running = engine_thread.running
    if running is None:
        node = find_node()
        name = peer if node is None else repr(node.members.name(peer))
        raise AutogradError(
            f"A local backward reached {what} {name}: the graph goes on there. "
            "Use telegrad.autograd.backward(context_id, [loss]) instead of loss.backward()."
        )
    return running


def _take(message: int, peer: int) -> Sequence[Tensor | None]:
    """The engine has come to a send."""
    return _running("tensors sent to worker", peer).take(message)


def _fire(message: int, index: int, peer: int, gradient: Tensor | None) -> None:
    """The engine has come to a recv."""
    running = engine_thread.running or _running("a tensor that came from worker", peer)
    running.fire(message, index, gradient)


class Send(torch.autograd.Function):
    """Tensors that leave. The node is a source of the backward pass."""

    @staticmethod
    def forward(ctx: Any, message: int, peer: int, *tensors: Tensor) -> Tensor:
        ctx.message = message
        ctx.peer = peer
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return _TOKEN.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, None, *_take(ctx.message, ctx.peer))


_NO_GRADIENTS = (None,) * 5


class Recv(torch.autograd.Function):
    """One tensor that arrived. It travels to its node inside a list: as an argument it would come
    out as a view of itself, and the user could not change it in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, message: int, index: int, peer: int, box: Any) -> Any:
        ctx.message = message
        ctx.index = index
        ctx.peer = peer
        ctx.set_materialize_grads(False)
        return box[0]

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor | None) -> Any:
        _fire(ctx.message, ctx.index, ctx.peer, gradient[0])
        return _NO_GRADIENTS


_apply_send = torch_private.applied(Send)
_apply_recv = torch_private.applied(Recv)

SendNode: Any = Send._backward_cls
RecvNode: Any = Recv._backward_cls


def _same_message(node: Any, other: object) -> bool:
    return isinstance(other, RecvNode) and bool(node.message == other.message)


# The hash stays that of the object: two nodes are different keys although they compare equal.
RecvNode.__eq__ = _same_message
RecvNode.__hash__ = object.__hash__


def send(
    next_message: Callable[[], int], peer: int, tensors: Sequence[Tensor]
) -> tuple[int, Any, list[int]] | None:
    """A message number, the node of those tensors that need gradient, and their places; None if
    there are none."""
    indices = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    if not indices:
        return None
    message = next_message()
    token = _apply_send(message, peer, *[tensors[index] for index in indices])
    return message, token.grad_fn, indices


def receive(
    message: int, peer: int, indices: Iterable[int], tensors: Sequence[Tensor]
) -> list[Any]:
    """Make each of these tensors one that came with this message; their nodes."""
    nodes: list[Any] = []
    for place, index in enumerate(indices):
        tensor = tensors[index].requires_grad_(False)
        node = _apply_recv(_ANCHOR, message, place, peer, [tensor]).grad_fn
        if node is None:
            raise RuntimeError(
                f"A message says that a tensor of type {tensor.dtype} needs gradient."
            )
        nodes.append(node)
    return nodes


_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")
_LAYOUT = attrgetter("layout")
_STRIDED = {torch.strided}


def fits(node: Any, gradients: Sequence[Tensor | None]) -> bool:
    """Whether these are dense gradients of the tensors that the node of a send stands for."""
    try:
        shapes = [*map(_SHAPE_AND_DTYPE, gradients)]
    except AttributeError:
        return False  # Some are absent.
    return shapes == node.shapes and {*map(_LAYOUT, gradients)} == _STRIDED


def set_names(send: str, recv: str) -> None:
    """What the nodes say they are."""
    SendNode.__name__, RecvNode.__name__ = send, recv


OWN_NAMES = ("SendBackward", "RecvBackward")


compiled = native.compiled("telegrad.autograd._graph")
"""The compiled module, where it is used."""

if compiled is not None:
    compiled.found_in_python(
        _take,
        _fire,
        _running,
        _ANCHOR,
        torch_private.compiled_autograd.put_away,
        torch_private.compiled_autograd.bring_back,
    )
    SendNode, RecvNode = compiled.SendNode, compiled.RecvNode
    send, receive, fits = compiled.send, compiled.receive, compiled.fits
    set_names = compiled.set_names
