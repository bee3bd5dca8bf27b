"""The table of tensors: what each one is, in the metadata; what it holds, in raw buffers.

Three rules decide what becomes a buffer.

1. A contiguous tensor of its own is its own buffer, without a copy. This is nearly every
   tensor, so it is tried first and asks torch as little as possible.
2. Tensors that lie over each other in one storage share one buffer, and on arrival one storage:
   a write through one shows through the other, there as here. Neighbours are joined too while
   the bytes between them do not exceed the bytes that they need.
3. Any other tensor sends the stretch of memory that it covers, with its strides, if that is at
   most twice its size; else a compact copy. A column of a large matrix never drags the matrix.
   Only a tensor whose own elements lie over each other is never copied: that would part them.

On arrival nothing may be read outside of a buffer. A layout knows how far it extends from its
first element (`Layout.extent`); a tensor is built only after this was compared with its buffer.

A sparse or quantized tensor is composed of dense ones, its parts, and torch copies some of them
when it is made. So a part takes no more bytes than came for it: none is expanded. Whoever sends
such a tensor writes out what was expanded.

What does not travel: `.grad`, hooks, Python attributes of a tensor. A tensor that requires grad
arrives as a leaf that requires grad; autograd replaces those that were not leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from telegrad.wire import torch_private
from telegrad.wire.errors import CodecError, Refusal
from telegrad.wire.layouts import Layout, layout_of, read_layout
from telegrad.wire.primitives import ByteBuffer, Reader, write_size, write_text
from telegrad.wire.trust import Limits

# How a record goes on. Plain numbers, because looking up the members of an enum shows in the time
# of a call. The two low bits of a record's first byte are its flags.
_WHOLE = 0 << 2  # contiguous, alone in the next buffer
_STRETCH = 1 << 2  # somewhere in a buffer, perhaps with others, perhaps for another device
_META = 2 << 2
_COO = 3 << 2
_COMPRESSED = 4 << 2
_QUANTIZED = 5 << 2
_QUANTIZED_BY_CHANNEL = 6 << 2

REQUIRES_GRAD = 1
_PARAMETER = 2
_FLAGS = REQUIRES_GRAD | _PARAMETER

# The largest element has 16 bytes: a stretch that starts at a multiple of it suits every dtype.
_ALIGNMENT = 16

_COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_STRIDED = torch.strided
_INTEGERS = {
    dtype.itemsize: dtype for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
}
_QUANTIZED_AS = (torch.uint8, torch.int8, torch.int32)
_ROWS_FIRST = (torch.sparse_csr, torch.sparse_bsr)
_SCALE = Struct("<dq")


@dataclass(slots=True)
class _Stretch:
    """Bytes of one storage that several tensors of the message share."""

    start: int
    stop: int
    needed: int
    members: list[torch.Tensor]
    buffer: int = -1


class _Place(NamedTuple):
    start: int
    stop: int
    tensor: torch.Tensor
    needed: int


def write_table(tensors: Sequence[torch.Tensor], out: bytearray, buffers: list[memoryview]) -> None:
    shared = _shared_stretches(tensors) if len(tensors) > 1 else {}
    for tensor in tensors:
        try:
            _write_record(tensor, out, buffers, shared.get(id(tensor)))
        except ValueError as error:
            raise Refusal(tensor, str(error)) from error
        except (RuntimeError, NotImplementedError) as error:
            raise _without_bytes(tensor) from error


def _without_bytes(tensor: torch.Tensor) -> Refusal:
    """What torch says in such a case speaks of its insides; it is the cause."""
    if tensor.is_nested:
        form = "is nested without being jagged; make it with layout=torch.jagged"
    elif tensor.is_quantized:
        form = f"is of {tensor.dtype} and has no scale; quantize a tensor, or dequantize this one"
    else:
        form = (
            "keeps them to itself, as those inside of vmap and other transforms of torch.func do; "
            "send a dense tensor, from outside of the transform"
        )
    return Refusal(tensor, f"torch does not give the bytes of a tensor that {form}")


def _write_record(
    tensor: torch.Tensor,
    out: bytearray,
    buffers: list[memoryview],
    stretch: _Stretch | None = None,
) -> None:
    if torch_private.in_dual_level() and unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise ValueError(
            "it has a tangent of forward-mode differentiation, which calls do not carry; send its "
            "primal"
        )
    if torch_private.is_functional(tensor):
        raise _without_bytes(tensor)
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is Parameter:
        flags |= _PARAMETER
    if tensor.layout is not _STRIDED:
        _write_sparse(tensor, flags, out, buffers)
    elif tensor.is_quantized:
        _write_quantized(tensor, flags, out, buffers)
    elif stretch is not None:
        _write_shared(tensor, flags, stretch, out, buffers)
    elif tensor.is_cpu:
        _write_strided(tensor, flags, out, buffers)
    elif tensor.is_meta:
        out.append(_META | flags)
        out += layout_of(tensor).header
    elif not holds(tensor, layout_of(tensor)):
        raise _shrunk(tensor)
    else:
        _write_stretch(_settled(tensor), flags, out, buffers)


def _write_strided(
    tensor: torch.Tensor, flags: int, out: bytearray, buffers: list[memoryview]
) -> None:
    layout = layout_of(tensor)
    if not holds(tensor, layout) and not torch_private.is_zero_tensor(tensor):
        raise _shrunk(tensor)
    if layout.castable:
        try:
            array = (tensor.detach() if flags & REQUIRES_GRAD else tensor).numpy()
        except RuntimeError:
            # A lazy negative or zero: torch has to make the numbers first.
            array = _settled(tensor).contiguous().numpy()
        out.append(flags)
        out += layout.header
        buffers.append(array.data.cast("B"))
    elif layout.nbytes == 0:
        out.append(flags)
        out += layout.header
    else:
        _write_stretch(_settled(tensor), flags, out, buffers)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its memory holds other numbers than the tensor stands for, or there is none."""
    return tensor.is_conj() or tensor.is_neg() or torch_private.is_zero_tensor(tensor)


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the numbers that it stands for in its memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.clone() if torch_private.is_zero_tensor(tensor) else tensor


def _write_stretch(
    tensor: torch.Tensor, flags: int, out: bytearray, buffers: list[memoryview]
) -> None:
    layout = layout_of(tensor)
    if layout.sparse:
        tensor = _compacted(tensor.detach())
        layout = layout_of(tensor)
    start = _start_of(tensor)
    _write_position(tensor, layout, flags, len(buffers), 0, out)
    buffers.append(_storage_bytes(tensor, start, start + layout.extent))


def _compacted(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy. Dimensions that were expanded stay so."""
    shape = tensor.shape
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return _written_out(tensor).expand(shape)


def _write_shared(
    tensor: torch.Tensor,
    flags: int,
    stretch: _Stretch,
    out: bytearray,
    buffers: list[memoryview],
) -> None:
    if stretch.buffer < 0:
        stretch.buffer = len(buffers)
        buffers.append(_storage_bytes(tensor, stretch.start, stretch.stop))
    offset = _start_of(tensor) - stretch.start
    _write_position(tensor, layout_of(tensor), flags, stretch.buffer, offset, out)


def _write_position(
    tensor: torch.Tensor, layout: Layout, flags: int, buffer: int, offset: int, out: bytearray
) -> None:
    out.append(_STRETCH | flags)
    out += layout.header
    write_size(out, buffer)
    write_size(out, offset)
    write_text(out, "" if tensor.is_cpu else str(tensor.device))


def _start_of(tensor: torch.Tensor) -> int:
    """Where in its storage a tensor begins, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


def holds(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether a tensor's storage has all of its elements: who resizes one does not ask for them."""
    start = tensor.storage_offset()
    end = layout.extent + start * tensor.itemsize if start else layout.extent
    return end <= tensor.untyped_storage().nbytes()


def _shrunk(tensor: torch.Tensor) -> ValueError:
    has = tensor.untyped_storage().nbytes()
    return ValueError(
        f"its storage was resized to {has or 'no'} bytes and does not hold it any more; send it "
        "while it has its elements"
    )


def _storage_bytes(tensor: torch.Tensor, start: int, stop: int) -> memoryview:
    if stop > tensor.untyped_storage().nbytes():
        raise _shrunk(tensor)
    seen = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    seen.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
    return seen.cpu().numpy().data


def _shared_stretches(tensors: Sequence[torch.Tensor]) -> dict[int, _Stretch]:
    """The stretch of each tensor that shares one, by the tensor's id.

    What was computed with gradient shares none: on arrival the two would have graphs and version
    counters of their own, and neither would see that the other is changed in place.
    """
    storages: dict[tuple[int, int, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is _STRIDED and not (
            tensor.is_meta or tensor.is_quantized or _is_lazy(tensor) or tensor.grad_fn is not None
        ):
            try:
                storage = tensor.untyped_storage()
                key = (storage.data_ptr(), storage.nbytes(), tensor.device)
            except (RuntimeError, NotImplementedError) as error:
                raise _without_bytes(tensor) from error
            storages.setdefault(key, []).append(tensor)
    return {
        id(member): stretch
        for group in storages.values()
        if len(group) > 1
        for stretch in _joined(group)
        if len(stretch.members) > 1
        for member in stretch.members
    }


def _joined(group: Iterable[torch.Tensor]) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    for start, stop, tensor, needed in sorted(_places(group), key=lambda place: place[:2]):
        last = stretches[-1] if stretches else None
        if last is not None and _belong_together(last, start, stop, needed):
            last.stop = max(last.stop, stop)
            last.needed += needed
            last.members.append(tensor)
        else:
            stretches.append(_Stretch(start // _ALIGNMENT * _ALIGNMENT, stop, needed, [tensor]))
    return stretches


def _belong_together(last: _Stretch, start: int, stop: int, needed: int) -> bool:
    return start < last.stop or stop - last.start <= 2 * (last.needed + needed)


def _places(group: Iterable[torch.Tensor]) -> Iterable[_Place]:
    for tensor in group:
        layout = layout_of(tensor)
        if layout.extent:
            start = _start_of(tensor)
            yield _Place(start, start + layout.extent, tensor, layout.distinct)


def _write_sparse(
    tensor: torch.Tensor, flags: int, out: bytearray, buffers: list[memoryview]
) -> None:
    plain = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        out.append(_COO | flags)
        out.append(tensor.is_coalesced())
        parts: tuple[torch.Tensor, ...] = torch_private.coo_parts(plain)
    elif tensor.layout in _COMPRESSED_LAYOUTS:
        out.append(_COMPRESSED | flags)
        out.append(_COMPRESSED_LAYOUTS.index(tensor.layout))
        if tensor.layout in _ROWS_FIRST:
            parts = (plain.crow_indices(), plain.col_indices(), plain.values())
        else:
            parts = (plain.ccol_indices(), plain.row_indices(), plain.values())
    else:
        raise ValueError(f"its layout is {tensor.layout}; send a dense or sparse tensor instead")
    write_size(out, tensor.dim())
    for length in tensor.shape:
        write_size(out, length)
    for part in parts:
        _write_part(part, out, buffers)


def _write_part(part: torch.Tensor, out: bytearray, buffers: list[memoryview]) -> None:
    if not part.is_meta:
        part = _settled(part)
        layout = layout_of(part)
        if not holds(part, layout):
            raise _shrunk(part)
        if not layout.dense:
            part = _written_out(part)
    _write_record(part, out, buffers)


def _written_out(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, in which expanded dimensions have elements of their own."""
    # As integers, because torch cannot copy some of its smallest types.
    same_size = _INTEGERS.get(tensor.itemsize, tensor.dtype)
    return tensor.view(same_size).contiguous().view(tensor.dtype)


def _write_quantized(
    tensor: torch.Tensor, flags: int, out: bytearray, buffers: list[memoryview]
) -> None:
    if tensor.dtype not in (torch.qint8, torch.quint8, torch.qint32):
        raise ValueError(f"its elements are {tensor.dtype}; dequantize it first")
    if not holds(tensor, layout_of(tensor, _INTEGERS[tensor.itemsize])):
        raise _shrunk(tensor)
    if tensor.qscheme() is torch.per_tensor_affine:
        out.append(_QUANTIZED | flags)
        out += _SCALE.pack(tensor.q_scale(), tensor.q_zero_point())
    elif tensor.qscheme() is torch.per_channel_affine:
        out.append(_QUANTIZED_BY_CHANNEL | flags)
        out.append(tensor.q_per_channel_axis())
        _write_part(tensor.q_per_channel_scales(), out, buffers)
        _write_part(tensor.q_per_channel_zero_points(), out, buffers)
    else:
        raise ValueError(f"its scheme is {tensor.qscheme()}; dequantize it first")
    _write_part(tensor.int_repr(), out, buffers)


def read_table(reader: Reader, count: int, limits: Limits) -> list[torch.Tensor]:
    storages: dict[tuple[int, str], torch.UntypedStorage] = {}
    return [_read_record(reader, limits, storages) for _ in range(count)]


def _read_record(
    reader: Reader, limits: Limits, storages: dict[tuple[int, str], torch.UntypedStorage]
) -> torch.Tensor:
    first = reader.data[reader.position]
    kind = first & ~_FLAGS
    if kind == _WHOLE:
        reader.position += 1
        tensor = _read_whole(read_layout(reader, limits.dims), reader)
        if not first:
            return tensor
    elif kind <= _META:
        reader.position += 1
        tensor = _read_dense(kind, read_layout(reader, limits.dims), reader, limits, storages)
    else:
        reader.position += 1
        tensor = _read_composed(kind, reader, limits)
    if first & _PARAMETER:
        return Parameter(tensor, requires_grad=bool(first & REQUIRES_GRAD))
    return tensor.requires_grad_() if first & REQUIRES_GRAD else tensor


def _read_dense(
    kind: int,
    layout: Layout,
    reader: Reader,
    limits: Limits,
    storages: dict[tuple[int, str], torch.UntypedStorage],
) -> torch.Tensor:
    if layout.nbytes > limits.tensor_bytes:
        raise CodecError(
            f"a tensor of shape {layout.shape} stands for {layout.nbytes} bytes, more than the "
            f"limit of {limits.tensor_bytes}"
        )
    if kind == _STRETCH:
        return _read_stretch(layout, reader, storages)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")


def _read_whole(layout: Layout, reader: Reader) -> torch.Tensor:
    if layout.castable:
        buffer = reader.next_buffer()
        if len(buffer) != layout.nbytes:
            raise CodecError(
                f"a tensor of {layout.nbytes} bytes came with a buffer of {len(buffer)}"
            )
        return torch.from_numpy(np.ndarray(layout.shape, layout.array_type, buffer))
    if layout.nbytes:
        raise CodecError(f"a tensor of {layout.dtype} and strides {layout.strides} is not whole")
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)


def _read_stretch(
    layout: Layout, reader: Reader, storages: dict[tuple[int, str], torch.UntypedStorage]
) -> torch.Tensor:
    number, offset, device = reader.size(), reader.size(), reader.text()
    if number > reader.taken:
        raise CodecError(f"a tensor is in buffer {number} before buffer {reader.taken} was used")
    if number < reader.taken and (number, device) not in storages:
        raise CodecError(f"a tensor is in buffer {number}, which belongs to another alone")
    buffer = reader.next_buffer() if number == reader.taken else reader.buffers[number]
    if offset % layout.dtype.itemsize or offset + layout.extent > len(buffer):
        raise CodecError(
            f"a tensor of {layout.extent} bytes at offset {offset} does not fit into its buffer "
            f"of {len(buffer)} bytes"
        )
    storage = storages.get((number, device))
    if storage is None:
        storage = storages[number, device] = _storage_over(buffer, device)
    tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
    tensor.set_(storage, offset // layout.dtype.itemsize, layout.shape, layout.strides)
    return tensor


def _storage_over(buffer: ByteBuffer, device: str) -> torch.UntypedStorage:
    seen = torch.from_numpy(np.frombuffer(buffer, np.uint8))
    return (seen.to(device) if device else seen).untyped_storage()


def _read_composed(kind: int, reader: Reader, limits: Limits) -> torch.Tensor:
    def part(*dtypes: torch.dtype) -> torch.Tensor:
        return _read_part(reader, limits, dtypes)

    if kind == _COO:
        coalesced, size = bool(reader.size()), _read_shape(reader, limits)
        return torch.sparse_coo_tensor(
            part(torch.int64), part(), size, is_coalesced=coalesced, check_invariants=True
        )
    if kind == _COMPRESSED:
        layout, size = _COMPRESSED_LAYOUTS[reader.size()], _read_shape(reader, limits)
        compressed, plain = part(torch.int32, torch.int64), part(torch.int32, torch.int64)
        return torch.sparse_compressed_tensor(
            compressed, plain, part(), size, layout=layout, check_invariants=True
        )
    if kind == _QUANTIZED:
        scale, zero_point = _SCALE.unpack(reader.take(_SCALE.size))
        numbers = part(*_QUANTIZED_AS)
        _check_scale(numbers.dtype, scale, zero_point, zero_point)
        return torch_private.quantized(numbers, scale, zero_point)
    if kind == _QUANTIZED_BY_CHANNEL:
        axis = reader.size()
        scales, zero_points = part(torch.float64), part(torch.int64)
        return _by_channel(axis, scales, zero_points, part(*_QUANTIZED_AS))
    raise CodecError(f"a tensor is of the unknown kind {kind}")


def _read_part(reader: Reader, limits: Limits, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """A dense tensor of one of these types, or of any if none is named.

    What torch would convert or copy into more memory than came for it is refused.
    """
    kind = reader.take(1)[0] & ~_FLAGS
    layout = read_layout(reader, limits.dims)
    if dtypes and layout.dtype not in dtypes:
        raise CodecError(
            f"a part of a composed tensor is of {layout.dtype}, where torch has "
            + " or ".join(map(str, dtypes))
        )
    if kind == _WHOLE:
        return _read_whole(layout, reader)
    if kind > _META:
        raise CodecError(f"a part of a composed tensor is of the unknown kind {kind}")
    if kind == _STRETCH and not layout.dense:
        raise CodecError(
            f"a part of a composed tensor stands for {layout.nbytes} bytes and has {layout.extent}"
        )
    # Nobody else may have the memory of indices: they are checked once and believed for ever.
    return _read_dense(kind, layout, reader, limits, {})


def _read_shape(reader: Reader, limits: Limits) -> tuple[int, ...]:
    return tuple([reader.size() for _ in range(reader.count(limits.dims, "dimensions"))])


def _by_channel(
    axis: int, scales: torch.Tensor, zero_points: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    if axis >= numbers.dim() or not (
        scales.shape == zero_points.shape == numbers.shape[axis : axis + 1]
    ):
        raise CodecError("the scales of a quantized tensor do not match its channels")
    if scales.numel():
        least, most = zero_points.aminmax()
        _check_scale(numbers.dtype, float(scales.sum()), int(least), int(most))
    return torch_private.quantized_by_channel(numbers, scales, zero_points, axis)


def _check_scale(dtype: torch.dtype, scale: float, least: int, most: int) -> None:
    """Torch looks at these numbers when the tensor is used, and not always."""
    bounds = torch.iinfo(dtype)
    if not isfinite(scale) or least < bounds.min or most > bounds.max:
        raise CodecError(f"a quantized tensor of {dtype} has no such scale or zero point")
