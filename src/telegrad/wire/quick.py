"""Short cuts for the messages that nearly all traffic consists of, in the form of all others.

A call of a function with at most one tensor, a tensor, None, and a parcel with at most one tensor
are written and read here in one go. Their bytes are those that `encode`, `decode` and `tensors`
would write and accept; what is not of such a form, or looks wrong in any way, is left to them. So
this file may be deleted, and nothing changes but the time that a small message takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from telegrad.wire import torch_private
from telegrad.wire.layouts import known_layout, layout_in
from telegrad.wire.names import name_of, object_named
from telegrad.wire.parcel import Parcel
from telegrad.wire.primitives import ByteBuffer
from telegrad.wire.tags import Tag
from telegrad.wire.tensors import REQUIRES_GRAD, holds
from telegrad.wire.trust import Limits, Trust

SMALL = 1 << 13
"""Bytes of a tensor that are copied sooner than described, and of a parcel."""
SHORT = 255
"""Lengths below it take one byte."""

_NO_TENSOR = bytes((0, 0))
_ONE_TENSOR = [bytes((1, 0, flags)) for flags in (0, REQUIRES_GRAD)]
_NONE = bytes((0, 0, Tag.NONE))
_TENSOR = bytes((Tag.TENSOR, 0))
_PARCEL = bytes((Tag.PARCEL,))
_CALL = bytes((Tag.TUPLE, 3, Tag.NAMED))
_WITHOUT = bytes((Tag.TUPLE, 0, Tag.DICT, 0))
_WITH_ONE = bytes((Tag.TUPLE, 1, Tag.TENSOR, 0, Tag.DICT, 0))
_STRIDED = torch.strided


class Packed(NamedTuple):
    meta: bytes
    tensors: list[Tensor]
    """The tensors of the message in table order, as the caller holds them."""
    buffers: list[memoryview]
    """C-contiguous bytes to be sent behind the metadata, none of them empty."""


def quick_pack(obj: Any, trust: Trust) -> Packed | None:
    """The message, if it is of one of the forms above."""
    kind = type(obj)
    tensor: Tensor | None = None
    if kind is Tensor:
        tensor, tree = obj, _TENSOR
    elif kind is tuple and len(obj) == 3:
        target, args, kwargs = obj
        # Types first: a result of three parts may hold anything, tensors without a truth included.
        if type(target) is not FunctionType or type(args) is not tuple or type(kwargs) is not dict:
            return None
        if kwargs or len(args) > 1:
            return None
        end = _WITHOUT
        if args:
            tensor, end = args[0], _WITH_ONE
        name = name_of(target, trust)
        if len(name) >= SHORT or not name.isascii():
            return None
        tree = b"".join((_CALL, bytes((len(name),)), name.encode(), end))
    elif kind is Parcel:
        topic, data, tensors = obj
        if len(tensors) > 1 or len(topic) >= SHORT or not topic.isascii() or len(data) > SMALL:
            return None
        if tensors:
            tensor = tensors[0]
        tree = b"".join((_PARCEL, bytes((len(topic),)), topic.encode(), data))
    elif obj is None:
        return Packed(_NONE, [], [])
    else:
        return None
    if tensor is None:
        return Packed(_NO_TENSOR + tree, [], [])
    if type(tensor) is not Tensor or tensor.layout is not _STRIDED or not tensor.is_cpu:
        return None
    layout = known_layout(tensor)
    if layout is None or not layout.castable or layout.nbytes > SMALL:
        return None
    if tensor.is_neg() or torch_private.is_zero_tensor(tensor):
        return None
    if not holds(tensor, layout):
        return None
    address = tensor.data_ptr()
    if not address:
        return None
    held = (ctypes.c_char * layout.nbytes).from_address(address)
    head = _ONE_TENSOR[tensor.requires_grad]
    return Packed(b"".join((head, layout.header, tree)), [tensor], [memoryview(bytes(held))])


NOT_QUICK: Any = object()


def quick_unpack(
    data: bytes,
    buffers: Sequence[ByteBuffer],
    trust: Trust,
    limits: Limits,
    arrive: Callable[[list[Tensor]], list[Tensor]] | None,
) -> Any:
    """What the message holds, or `NOT_QUICK`."""
    count = len(buffers)
    if data == _NONE and not count:
        if arrive is not None:
            arrive([])
        return None
    if count > 1 or len(data) < 4 or data[0] != count or data[1] or limits.tensors < count:
        return NOT_QUICK
    layout, at = None, 2
    if count:
        layout, at = layout_in(data, 3, limits.dims)
        if layout is None or not layout.castable or len(buffers[0]) != layout.nbytes:
            return NOT_QUICK
        if data[2] and (data[2] != REQUIRES_GRAD or not layout.dtype.is_floating_point):
            return NOT_QUICK
    form = data[at : at + 4]
    if form[:3] == _CALL and len(form) == 4:
        start = at + 4
        end = start + form[3]
        if data[end:] != (_WITH_ONE if count else _WITHOUT) or form[3] == SHORT:
            return NOT_QUICK
        if limits.items < 3 or limits.depth < 2:
            return NOT_QUICK
    elif form[:1] == _PARCEL and len(form) > 1:
        start = at + 2
        end = start + form[1]
        if end > len(data) or form[1] == SHORT:
            return NOT_QUICK
    elif form == _TENSOR and count:
        start = end = 0
    else:
        return NOT_QUICK
    name = data[start:end]
    if not name.isascii():
        return NOT_QUICK
    target = object_named(name.decode(), trust) if form[0] == Tag.TUPLE else None
    tensors: list[Tensor] = []
    if layout is not None:
        tensor = torch.from_numpy(np.ndarray(layout.shape, layout.array_type, buffers[0]))
        tensors.append(tensor.requires_grad_() if data[2] else tensor)
    if arrive is not None:
        tensors = arrive(tensors)
    if form[0] == Tag.TUPLE:
        return target, tuple(tensors), {}
    if form[0] == Tag.TENSOR:
        return tensors[0]
    return Parcel(name.decode(), data[end:], tensors)
