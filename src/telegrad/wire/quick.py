"""Short cuts for the messages that nearly all traffic consists of, in the form of all others.

A call of a function with a few tensors, a tensor, None, and a parcel with a few tensors are written
and read here in one go. Their bytes are those that `encode`, `decode` and `tensors` would write and
accept; what is not of such a form, or looks wrong in any way, is left to them. So
this file may be deleted, and nothing changes but the time that a small message takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from telegrad.wire import torch_private
from telegrad.wire.layouts import Layout, known_layout, layout_in
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
FEW = 4
"""The most tensors of such a message."""

_TENSORS = [bytes((count, 0)) for count in range(FEW + 1)]
_FLAGS = [bytes((flags,)) for flags in (0, REQUIRES_GRAD)]
_NONE = bytes((0, 0, Tag.NONE))
_TENSOR = bytes((Tag.TENSOR, 0))
_PARCEL = bytes((Tag.PARCEL,))
_CALL = bytes((Tag.TUPLE, 3, Tag.NAMED))
_ARGUMENTS = [
    bytes((Tag.TUPLE, count))
    + b"".join(bytes((Tag.TENSOR, place)) for place in range(count))
    + bytes((Tag.DICT, 0))
    for count in range(FEW + 1)
]
_STRIDED = torch.strided


class Packed(NamedTuple):
    meta: bytes
    tensors: list[Tensor]
    """The tensors of the message in table order, as the caller holds them."""
    buffers: list[memoryview]
    """C-contiguous bytes to be sent behind the metadata, none of them empty."""
    untracked: int = 0
    """So many of the buffers, the last ones, are of other objects: those have no version counter
    that would tell later whether they were changed."""


def quick_pack(obj: Any, trust: Trust) -> Packed | None:
    """The message, if it is of one of the forms above."""
    kind = type(obj)
    tensors: Sequence[Tensor]
    if kind is Tensor:
        tensors, tree = (obj,), _TENSOR
    elif kind is tuple and len(obj) == 3:
        target, tensors, kwargs = obj
        # Types first: a result of three parts may hold anything, tensors without a truth included.
        if type(target) is not FunctionType and not _is_of_module(target):
            return None
        if type(tensors) is not tuple or type(kwargs) is not dict or kwargs or len(tensors) > FEW:
            return None
        name = name_of(target, trust)
        if len(name) >= SHORT or not name.isascii():
            return None
        tree = b"".join((_CALL, bytes((len(name),)), name.encode(), _ARGUMENTS[len(tensors)]))
    elif kind is Parcel:
        topic, data, tensors = obj
        if len(tensors) > FEW or len(topic) >= SHORT or not topic.isascii() or len(data) > SMALL:
            return None
        tree = b"".join((_PARCEL, bytes((len(topic),)), topic.encode(), data))
    elif obj is None:
        return Packed(_NONE, [], [])
    else:
        return None
    if torch_private.in_dual_level():
        return None
    parts = [_TENSORS[len(tensors)]]
    buffers: list[memoryview] = []
    try:
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.layout is not _STRIDED or not tensor.is_cpu:
                return None
            layout = known_layout(tensor)
            if layout is None or not layout.castable or tensor.is_neg():
                return None
            if torch_private.is_zero_tensor(tensor) or not holds(tensor, layout):
                return None
            if layout.nbytes > SMALL:
                array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
                buffers.append(array.data.cast("B"))
            else:
                address = tensor.data_ptr()
                if not address:
                    return None
                held = (ctypes.c_char * layout.nbytes).from_address(address)
                buffers.append(memoryview(bytes(held)))
            parts += (_FLAGS[tensor.requires_grad], layout.header)
    except RuntimeError:
        # Tensors that look like others and have no memory: nested ones, those inside of transforms.
        return None
    if len(tensors) > 1:
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if len(storages) < len(tensors):
            # They may lie over each other.
            return None
    parts.append(tree)
    return Packed(b"".join(parts), list(tensors), buffers)


def _is_of_module(target: object) -> bool:
    """Whether it is a function as `torch.add`, and not one as `[].append`, which is of a value."""
    return type(target) is BuiltinFunctionType and isinstance(
        target.__self__, ModuleType | type | None
    )


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
    if count > FEW or len(data) < 4 or data[0] != count or data[1] or limits.tensors < count:
        return NOT_QUICK
    at = 2
    layouts: list[tuple[Layout, int]] = []
    for buffer in buffers:
        flags = data[at] if at < len(data) else SHORT
        layout, at = layout_in(data, at + 1, limits.dims)
        if layout is None or not layout.castable or len(buffer) != layout.nbytes:
            return NOT_QUICK
        if flags and (flags != REQUIRES_GRAD or not layout.dtype.is_floating_point):
            return NOT_QUICK
        layouts.append((layout, flags))
    form = data[at : at + 4]
    if form[:3] == _CALL and len(form) == 4:
        start = at + 4
        end = start + form[3]
        if data[end:] != _ARGUMENTS[count] or form[3] == SHORT:
            return NOT_QUICK
        if limits.items < 3 + count or limits.depth < 2:
            return NOT_QUICK
    elif form[:1] == _PARCEL and len(form) > 1:
        start = at + 2
        end = start + form[1]
        if end > len(data) or form[1] == SHORT:
            return NOT_QUICK
    elif form == _TENSOR and count == 1:
        start = end = 0
    else:
        return NOT_QUICK
    name = data[start:end]
    if not name.isascii():
        return NOT_QUICK
    target = object_named(name.decode(), trust) if form[0] == Tag.TUPLE else None
    tensors: list[Tensor] = []
    for (layout, flags), buffer in zip(layouts, buffers, strict=True):
        tensor = torch.from_numpy(np.ndarray(layout.shape, layout.array_type, buffer))
        tensors.append(tensor.requires_grad_() if flags else tensor)
    if arrive is not None:
        tensors = arrive(tensors)
    if form[0] == Tag.TUPLE:
        return target, tuple(tensors), {}
    if form[0] == Tag.TENSOR:
        return tensors[0]
    return Parcel(name.decode(), data[end:], tensors)
