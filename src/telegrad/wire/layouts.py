"""Dtype, shape and strides of a tensor, as bytes and back.

Programs send tensors of few layouts many times. So a layout is worked out and checked once
and remembered from both sides: by (dtype, shape, strides) when it leaves, by its bytes when it
arrives. What is in the caches has been checked; the caches are emptied when they grow too large.

Strides travel only where they differ from those of a contiguous tensor. Numbers are
little-endian, as is every machine that torch supports; tensor bytes travel as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from struct import Struct, pack
from typing import Any

import numpy as np
import torch

from telegrad.wire.errors import CodecError
from telegrad.wire.primitives import Reader

# The position is the number on the wire: append only.
_DTYPE_NAMES = """
    uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool
    bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    float4_e2m1fn_x2 uint16 uint32 uint64 qint8 quint8 qint32 quint4x2 quint2x4
    bits1x8 bits2x4 bits4x2 bits8 bits16
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
"""

DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in enumerate(_DTYPE_NAMES.split())
    if hasattr(torch, name)
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_QUANTIZED = frozenset(
    dtype for dtype in DTYPES.values() if str(dtype).startswith(("torch.qint", "torch.quint"))
)

_ARRAY_NAMES = """
    uint8 int8 int16 int32 int64 uint16 uint32 uint64
    float16 float32 float64 complex64 complex128 bool
"""
_ARRAY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name) for name in _ARRAY_NAMES.split()
}
# memoryview.cast knows neither half precision nor complex numbers.
CASTABLE = frozenset(_ARRAY_TYPES) - {torch.float16, torch.complex64, torch.complex128}
"""What `_native.cpp` writes and reads, if contiguous and not empty."""

_STRIDED = 0x80
_BIGGEST = (1 << 63) - 1
# A view that spans no more than this keeps its strides: packing it would save nothing.
_SMALL_EXTENT = 8192
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    header: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    array_type: np.dtype[Any] | None
    """The numpy dtype of the same elements, where numpy has one."""
    castable: bool
    """Contiguous, not empty, and of a type whose memoryview can be seen as bytes."""
    contiguous: bool
    nbytes: int
    """Bytes of the elements."""
    distinct: int
    """Bytes of the elements, those of expanded dimensions counted once."""
    extent: int
    """Bytes from the first element in memory to the end of the last; what a buffer must hold."""
    dense: bool
    """Whether no dimension is expanded and the extent has room for all elements: a copy takes no
    more memory."""
    sparse: bool
    """Whether most of the extent is not the tensor's, and a compact copy would be as good."""


_by_tensor: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], Layout] = {}
_by_header: dict[bytes, Layout] = {}


def layout_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Layout:
    """The layout of a strided tensor, or of one of another dtype whose elements lie as its own do;
    ValueError if that dtype cannot travel this way."""
    key = (dtype or tensor.dtype, tensor.shape, tensor.stride())
    layout = _by_tensor.get(key)
    if layout is None:
        layout = _worked_out(key[0], tuple(key[1]), key[2])
        _remember(_by_tensor, key, layout)
    return layout


def is_sparse(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor that lies so is sent as a compact copy."""
    return (
        dtype in DTYPE_CODES
        and dtype not in _QUANTIZED
        and _worked_out(dtype, shape, strides).sparse
    )


def read_layout(reader: Reader, max_dims: int) -> Layout:
    data, start = reader.data, reader.position
    dims = data[start + 1]
    end = start + 2 + (8 * dims if dims < _STRIDED else 16 * (dims - _STRIDED))
    header = data[start:end]
    layout = _by_header.get(header)
    if layout is None:
        layout = _parsed(reader.take(end - start), dims % _STRIDED, dims >= _STRIDED)
        _remember(_by_header, header, layout)
    if dims % _STRIDED > max_dims:
        raise CodecError(f"a tensor of {dims % _STRIDED} dimensions passes the limit of {max_dims}")
    reader.position = end
    return layout


def _remember(cache: dict[Any, Layout], key: Any, layout: Layout) -> None:
    if len(cache) >= _REMEMBERED:
        cache.clear()
    cache[key] = layout


def _parsed(header: bytes, dims: int, strided: bool) -> Layout:
    dtype = DTYPES.get(header[0])
    if dtype is None:
        raise CodecError(f"unknown dtype number {header[0]}; do both ends run the same torch?")
    numbers = Struct(f"<{dims * (2 if strided else 1)}q").unpack_from(header, 2)
    shape = numbers[:dims]
    return _worked_out(dtype, shape, numbers[dims:] if strided else contiguous_strides(shape))


def _worked_out(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    if dtype in _QUANTIZED or dtype not in DTYPE_CODES:
        raise ValueError(f"elements of {dtype} cannot travel as they lie in memory")
    if shape and (min(shape) < 0 or min(strides) < 0):
        raise CodecError(f"negative numbers in the shape {shape} or the strides {strides}")
    item = dtype.itemsize
    count = prod(shape)
    distinct = item * prod(n for n, stride in zip(shape, strides, strict=True) if stride)
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    extent = (last + 1) * item if count else 0
    if max(count * item, extent) > _BIGGEST:
        raise CodecError(f"a tensor of shape {shape} and strides {strides} passes 2**63 bytes")
    contiguous = strides == contiguous_strides(shape)
    return Layout(
        header=_header(dtype, shape, () if contiguous else strides),
        dtype=dtype,
        shape=shape,
        strides=strides,
        array_type=_ARRAY_TYPES.get(dtype),
        castable=contiguous and count > 0 and dtype in CASTABLE,
        contiguous=contiguous,
        nbytes=count * item,
        distinct=distinct,
        extent=extent,
        dense=count * item <= min(distinct, extent),
        sparse=extent > max(2 * distinct, _SMALL_EXTENT) and _lie_apart(shape, strides),
    )


def _lie_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two elements share memory, expanded dimensions aside: a copy would part them."""
    reach = 0
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if stride and length > 1:
            if stride <= reach:
                return False
            reach += (length - 1) * stride
    return True


def _header(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    dims = len(shape) | _STRIDED if strides else len(shape)
    numbers = shape + strides
    return pack(f"<BB{len(numbers)}q", DTYPE_CODES[dtype], dims, *numbers)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As torch counts them: an empty dimension counts as one."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
