"""Objects to bytes and back.

A message has two parts. The *table* describes its tensors, in the order in which they were met;
their bytes lie beside the metadata as raw buffers, views of the tensors' own memory. The *tree*
holds everything else and refers to tensors by their place in the table. What the tree does not
know is pickled, in a third part behind it.

    size   number of tensors
    size   bytes of the pickled part
    table  one record per tensor          (see tensors)
    tree   one value                      (see encode, decode)
    pickled                               (see opaque)

The table comes first so that autograd can put its own tensors in place of those that arrived,
before anything refers to them.

What must never happen: that a message from a peer that is trusted with data only makes this
process import, call or unpickle anything; that a tensor sees memory outside of its buffer; that
memory is allocated because a message says so rather than because it is that long; that anything
but `CodecError` is raised for what a message holds.

The buffers that `pack` gives are the tensors' memory, not a copy, except for small ones. Whoever
keeps them keeps the memory alive, and sees what the program writes to it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.wire import quick
from telegrad.wire.decode import Decoder
from telegrad.wire.decode_objects import read_tree
from telegrad.wire.encode import Encoder
from telegrad.wire.encode_objects import write_tree
from telegrad.wire.errors import CodecError, Refusal, Unpackable
from telegrad.wire.names import export, extend, is_exported
from telegrad.wire.packed import NOT_QUICK, Packed
from telegrad.wire.paths import path_to
from telegrad.wire.primitives import ByteBuffer, write_size
from telegrad.wire.tensors import read_table, write_table
from telegrad.wire.trust import LIMITS, Limits, Trust

__all__ = [
    "LIMITS",
    "CodecError",
    "Limits",
    "Packed",
    "Trust",
    "Unpackable",
    "export",
    "extend",
    "is_exported",
    "pack",
    "unpack",
]

_NO_TABLE = bytes(2)


def pack(obj: Any, scope: object = None, trust: Trust = Trust.CODE) -> Packed:
    """Make a message of an object. `scope` is handed to the extensions that are met.

    Raises `Unpackable`, which says where the value sits that cannot travel, and what to do.
    """
    try:
        packed = quick.pack(obj, trust)
        if packed is not None:
            return packed
        encoder = write_tree(obj, scope, trust)
        if not encoder.tensors and encoder.pickler is None:
            buffers = encoder.buffers
            packed = Packed(_NO_TABLE + encoder.out, [], buffers, len(buffers))
        else:
            packed = _with_table(encoder)
    except Refusal as refusal:
        culprit = refusal.culprit
        path, kind = path_to(culprit, obj), type(culprit).__qualname__
        raise Unpackable(path, kind, refusal.reason) from refusal.__cause__
    except RecursionError as error:
        raise Unpackable("value", type(obj).__qualname__, "it nests too deep") from error
    if len(packed.meta) > LIMITS.meta:
        raise _too_large(obj, len(packed.meta))
    return packed


def _with_table(encoder: Encoder) -> Packed:
    pickled = encoder.pickler.stream.getvalue() if encoder.pickler else b""
    head = bytearray()
    if pickled or len(encoder.tensors) >= 255:
        write_size(head, len(encoder.tensors))
        write_size(head, len(pickled))
    else:
        head += bytes((len(encoder.tensors), 0))
    buffers: list[memoryview] = []
    write_table(encoder.tensors, head, buffers)
    buffers += encoder.buffers
    meta = b"".join((head, encoder.out, pickled))
    return Packed(meta, encoder.tensors, buffers, len(encoder.buffers))


def _too_large(obj: object, size: int) -> Unpackable:
    return Unpackable(
        "value",
        type(obj).__qualname__,
        f"it takes {size} bytes besides its tensors, more than {LIMITS.meta}; send large data as "
        f"tensors or in parts",
    )


def unpack(
    meta: bytes | bytearray | memoryview,
    buffers: Sequence[ByteBuffer],
    scope: object = None,
    trust: Trust = Trust.CODE,
    limits: Limits = LIMITS,
    arrive: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
) -> Any:
    """Make the object of a message. The tensors keep the buffers as their memory.

    `arrive` is given the tensors before anything refers to them, and gives those to use instead.
    Raises `CodecError` for whatever is wrong with the message, and what `arrive` raises.
    """
    value = quick.unpack(meta, buffers, trust, limits, arrive)
    if value is not NOT_QUICK:
        return value
    if torch.is_inference_mode_enabled():
        # What arrives is the same whichever thread reads it: one that waits may be in that mode.
        with torch.inference_mode(False):
            return unpack(meta, buffers, scope, trust, limits, arrive)
    if len(meta) > limits.meta:
        raise CodecError(f"{len(meta)} bytes of metadata pass the limit of {limits.meta}")
    data = meta if type(meta) is bytes else bytes(meta)
    decoder = Decoder(data, buffers, scope, trust, limits)
    try:
        _read_tensors(decoder)
    except CodecError:
        raise
    except Exception as error:
        raise _malformed(error) from error
    if arrive is not None:
        decoder.tensors = arrive(decoder.tensors)
    try:
        return read_tree(decoder)
    except CodecError:
        raise
    except Exception as error:
        raise _malformed(error) from error


def _read_tensors(decoder: Decoder) -> None:
    data = decoder.data
    if data[0] < 255 and data[0] <= decoder.limits.tensors and data[1] == 0:
        # Few tensors and nothing pickled, as nearly always.
        decoder.position = 2
        if data[0]:
            decoder.tensors = read_table(decoder, data[0], decoder.limits)
        return
    count = decoder.count(decoder.limits.tensors, "tensors")
    pickled = decoder.size()
    if pickled:
        end = len(decoder.data) - pickled
        if end < decoder.position:
            raise CodecError(f"the message ends before its {pickled} bytes of pickled objects")
        decoder.pickled = decoder.data[end:]
        decoder.data = decoder.data[:end]
    if count:
        decoder.tensors = read_table(decoder, count, decoder.limits)


def _malformed(error: Exception) -> CodecError:
    """What Python, torch or a class of the user found wrong while the message was read."""
    return CodecError(f"the message cannot be read: {type(error).__name__}: {error}")
