"""What crossed in a context, gathered from the workers that know it; `figure` draws it.

Each worker answers for its own part. The answer is data: what a send is made of is told as a short
expression, in which recvs stand by the number of their message, as `recv#17`. The workers are asked
outside of any context, so that to look at one does not change it.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad.autograd.context import Context, SendRecord
from telegrad.autograd.enclosed import EnclosedSend
from telegrad.autograd.nodes import RecvNode
from telegrad.autograd.plan import LeafNode

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

DESCRIBE = "autograd.describe"
PATIENCE = 5.0
_MOST_OPERATIONS = 8
_LONGEST_EXPRESSION = 72
_MOST_INPUTS = 4


@dataclass(frozen=True, slots=True)
class Sent:
    """Tensors that left in one message."""

    message: int
    peer: int
    shapes: tuple[str, ...]
    made_of: str
    needs: tuple[int, ...]
    """The messages whose tensors went into it."""


@dataclass(frozen=True, slots=True)
class Received:
    """Tensors that arrived in one message."""

    message: int
    peer: int
    count: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has of a context."""

    sends: tuple[Sent, ...]
    recvs: tuple[Received, ...]
    knows: tuple[int, ...]
    gradients: int


def part_of(context: Context | None) -> Part | None:
    """The part of the calling worker."""
    if context is None:
        return None
    recvs = list(context.recvs.values())
    counts = {recv.message: len(recv.nodes) for recv in recvs}
    return Part(
        tuple(_sent(send, counts) for send in list(context.sends.values())),
        tuple(Received(recv.message, recv.peer, len(recv.nodes)) for recv in recvs),
        tuple(sorted(context.known_workers)),
        len(context.gradients()),
    )


def gather(service: Autograd, context: Context) -> dict[int, Part | str]:
    """The part of each worker that can be asked, or why it cannot; the calling worker's first."""
    own = part_of(context)
    assert own is not None
    parts: dict[int, Part | str] = {service.node.info.id: own}
    asked = set(parts)
    asking = [worker for worker in own.knows if worker not in asked]
    while asking:
        asked.update(asking)
        answers = dict(zip(asking, _ask(service, context.id, asking), strict=True))
        parts.update(answers)
        heard = [answer for answer in answers.values() if isinstance(answer, Part)]
        asking = sorted({worker for part in heard for worker in part.knows} - asked)
    return parts


def _ask(service: Autograd, context_id: int, workers: Sequence[int]) -> Iterator[Part | str]:
    node = service.node
    outside = contextvars.Context()
    calls = [
        outside.run(node.call, node.members.member(w).info, DESCRIBE, (context_id,), None, PATIENCE)
        for w in workers
    ]
    for call in calls:
        try:
            yield node.wait(call) or "it does not hold the context"
        except Exception as error:
            yield str(error)


def _sent(send: SendRecord | EnclosedSend, counts: dict[int, int]) -> Sent:
    shapes = tuple(f"{str(dtype).removeprefix('torch.')} {_shape(s)}" for s, dtype in send.shapes)
    if send.node is None:
        return Sent(send.message, send.peer, shapes, "computed by a compiled function", ())
    made_of, needs = expression(send.node.next_functions, counts)
    return Sent(send.message, send.peer, shapes, made_of, needs)


def expression(
    edges: Sequence[tuple[Any, int]], counts: dict[int, int]
) -> tuple[str, tuple[int, ...]]:
    """How the local graph computes what these edges stand for, and from which messages.

    `counts` says how many tensors each message brought.
    """
    recvs, inputs, operations = _walk(edges, counts)
    text = ""
    if operations <= _MOST_OPERATIONS:
        text = ", ".join(_render(node, number, counts) for node, number in edges)
    if not text or len(text) > _LONGEST_EXPRESSION:
        shown = inputs[:_MOST_INPUTS]
        if len(inputs) > _MOST_INPUTS:
            shown = [*shown, f"{len(inputs) - _MOST_INPUTS} more"]
        text = f"{operations} operations on {', '.join(shown) or 'nothing that needs gradient'}"
    return text, recvs


def root_expression(root: Tensor, context: Context) -> str:
    counts = {recv.message: len(recv.nodes) for recv in list(context.recvs.values())}
    return expression([(root.grad_fn, root.output_nr)], counts)[0]


def _walk(
    edges: Sequence[tuple[Any, int]], counts: dict[int, int]
) -> tuple[tuple[int, ...], list[str], int]:
    """The messages below these edges, the inputs by name, and the number of operations."""
    recvs: dict[int, None] = {}
    inputs: list[str] = []
    seen: set[Any] = set()
    operations = 0
    stack = [node for node, _ in reversed(edges)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) is RecvNode or type(node) is LeafNode:
            inputs.append(_input(node, counts))
        else:
            operations += 1
            stack += [child for child, _ in reversed(node.next_functions)]
        if type(node) is RecvNode:
            recvs[node.message] = None
    return tuple(recvs), inputs, operations


def _render(node: Any, number: int, counts: dict[int, int]) -> str:
    if node is None:
        return "?"
    if type(node) is RecvNode or type(node) is LeafNode:
        return _input(node, counts)
    children = [(child, place) for child, place in node.next_functions if child is not None]
    inputs = ", ".join(_render(child, place, counts) for child, place in children)
    return f"{_operation(node)}({inputs})" + (f"[{number}]" if number else "")


def _input(node: Any, counts: dict[int, int]) -> str:
    if type(node) is LeafNode:
        return f"leaf{_shape(node.variable.shape)}"
    several = counts.get(node.message, 1) > 1
    return f"recv#{node.message}" + (f"[{node.index}]" if several else "")


def _operation(node: Any) -> str:
    """`NativeLayerNormBackward0` is `native_layer_norm`."""
    name = re.sub(r"Backward\d*$", "", node.name())
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
