"""Messages that a call site has sent before.

What a call in a graph sends is the same each time but for the numbers in its tensors: the function,
the structure of the arguments and the constants are known since the call was traced, and shapes
seldom change. So the part of a message that is not tensors is written once for each kind of
tensors, and kept with the site.

Not so if a reference is among the arguments: each that leaves is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.compile.arguments import Template
from telegrad.rpc.node import Node
from telegrad.wire.codec import Packed, Unpackable, pack
from telegrad.wire.layouts import layout_of

_MANY = 64
"""Kinds that are kept for one site."""

Kind = tuple[Any, ...]


def may_be_kept(template: Template) -> bool:
    """Whether nothing but tensors and numbers differs from one message to the next."""
    match template[0]:
        case "tensor" | "int":
            return True
        case "constant":
            return template[1] is None or isinstance(template[1], bool | str | float | bytes)
        case "list" | "tuple":
            return all(map(may_be_kept, template[1:]))
        case "dict":
            return all(isinstance(k, str) and may_be_kept(item) for k, item in template[1:])
    return False


class Written:
    """The messages of one site, as far as they have been written."""

    __slots__ = ("_by_kind",)

    def __init__(self) -> None:
        self._by_kind: dict[Kind, bytes] = {}

    def find(self, tensors: Sequence[Tensor], ints: Sequence[int]) -> Packed | None:
        """The message with these tensors, if one of their kind was written before."""
        meta = self._by_kind.get(_kind(tensors, ints))
        if meta is None or not all(map(_is_plain, tensors)) or not _are_apart(tensors):
            return None
        return Packed(meta, list(tensors), list(map(_bytes, tensors)))

    def write(
        self, node: Node, to: int, request: object, tensors: Sequence[Tensor], ints: Sequence[int]
    ) -> None:
        """Keep the message of a request, if another of its kind can be made of it."""
        if not (all(map(_is_plain, tensors)) and _are_apart(tensors)):
            return
        try:
            packed = pack(request, node.passages[to], node.trust)
        except Unpackable:
            return  # Who makes the call says so.
        in_order = len(packed.tensors) == len(tensors) == len(packed.buffers) and all(
            a is b for a, b in zip(packed.tensors, tensors, strict=True)
        )
        if in_order and all(layout_of(tensor).castable for tensor in tensors):
            if len(self._by_kind) >= _MANY:
                self._by_kind.clear()
            self._by_kind[_kind(tensors, ints)] = packed.meta


def _kind(tensors: Sequence[Tensor], ints: Sequence[int]) -> Kind:
    return (*[(t.dtype, t.shape, t.requires_grad) for t in tensors], *ints)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor are what is sent of it."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and bool(tensor.data_ptr())
    )


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Tensors that share memory arrive so, which is another message."""
    if len(tensors) < 2:
        return True
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.detach().numpy().data
    return view.cast("B")
