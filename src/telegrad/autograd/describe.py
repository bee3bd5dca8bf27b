"""A context as a person reads it: sends, recvs, and what each send depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from telegrad.autograd.context import Context, SendRecord
from telegrad.autograd.crossing import RecvNode
from telegrad.autograd.enclosed import EnclosedSend
from telegrad.autograd.plan import LeafNode

_MAX_LEAVES = 4


def describe_context(context: Context, worker_name: Callable[[int], str], here: str) -> str:
    """One line for each recv and send of this worker, and under each send what it is made of.

    Sends and recvs are numbered in the order in which they took place here.
    """
    recv_names = {m: f"recv{i}" for i, m in enumerate(context.recvs, start=1)}
    lines = [f"context {context.id} on worker {here!r}"]
    known = sorted(worker_name(worker) for worker in context.known_workers)
    lines.append(f"  knows: {', '.join(known) or 'no other worker'}")
    for recv in list(context.recvs.values()):
        name, peer = recv_names[recv.message], worker_name(recv.peer)
        lines.append(f"  {name} <- {peer}: {_count(recv.count, 'tensor')} (message {recv.message})")
    for i, send in enumerate(list(context.sends.values()), start=1):
        lines += _send_lines(f"send{i}", send, worker_name(send.peer), recv_names)
    gradients = len(context.gradients())
    lines.append(f"  gradients: {gradients or 'none'}")
    return "\n".join(lines)


def _send_lines(
    name: str, send: SendRecord | EnclosedSend, peer: str, recv_names: dict[int, str]
) -> list[str]:
    lines = [f"  {name} -> {peer}: {_count(len(send.shapes), 'tensor')} (message {send.message})"]
    if send.node is None:
        return [*lines, "    from inside of a compiled function"]
    recvs, leaves, interior = _made_of(send.node)
    lines += [f"    depends on {recv_names.get(message, 'a recv')}" for message in recvs]
    lines += [
        f"    depends on a leaf of shape {tuple(leaf.shape)}" for leaf in leaves[:_MAX_LEAVES]
    ]
    if len(leaves) > _MAX_LEAVES:
        lines.append(f"    depends on {len(leaves) - _MAX_LEAVES} more leaves")
    if interior:
        lines.append(f"    through {_count(interior, 'local operation')}")
    return lines


def _made_of(node: Any) -> tuple[Sequence[int], list[Any], int]:
    recvs: dict[int, None] = {}
    leaves: list[Any] = []
    seen: set[Any] = set()
    stack = [node]
    interior = 0
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is None or child in seen:
                continue
            seen.add(child)
            if type(child) is RecvNode:
                recvs[child.message] = None
            elif type(child) is LeafNode:
                leaves.append(child.variable)
            else:
                interior += 1
                stack.append(child)
    return list(recvs), leaves, interior


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
