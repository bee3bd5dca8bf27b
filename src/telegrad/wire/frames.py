"""The shape of a frame: what stands in its header and how large it may be.

    header | buffer table | freed slots | note | meta | inline buffers

The header has a fixed size and says how many bytes follow it. The buffer table has one row per
tensor buffer: its length, and where it is: `INLINE`, at an offset in the sender's arena, on its
way through the connection's process group under a tag (`GROUP` and the tag), or with so many of its
bytes inline and the others on the connection's lane (`SPLIT` and the number of the former). Freed
slots are arena offsets that the sender of this frame gives back to its receiver. The note belongs
to the layer above the calls (autograd) and has a few bytes per tensor; the meta is what the codec
wrote. No number of a frame that the codec has made may exceed its field: a frame that fails after
it was numbered leaves a gap that ends the session.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from telegrad.wire.errors import CodecError
from telegrad.wire.primitives import ByteBuffer

HEADER = struct.Struct("<BB2xIIIIQQQQ")
HEADER_SIZE = HEADER.size
ONE_ROW = struct.Struct("<2Q")
INLINE = (1 << 64) - 1
GROUP = 1 << 63
SPLIT = 1 << 62
ROW = 16
SLOT = 8


class Kind(IntEnum):
    """What a frame is for."""

    CALL = 1
    REPLY = 2
    ERROR = 3
    POST = 4
    HOUSEKEEPING = 5
    LEAVING = 6


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a peer may ask us to hold. A frame beyond them ends its connection."""

    frame_bytes: int = 64 << 30
    meta_bytes: int = 2 << 30
    buffers: int = 1 << 20


LIMITS = FrameLimits()
KINDS = frozenset(int(k) for k in Kind)


class Frame(NamedTuple):
    """One received frame. `meta` and `buffers` are this frame's own memory."""

    kind: int
    call_id: int
    note: bytes
    meta: bytes
    buffers: list[ByteBuffer]


def head_of(
    kind: int,
    call_id: int,
    meta: bytes,
    note: bytes,
    rows: Sequence[tuple[int, int]],
    seq: int,
    ack: int,
    inline: int,
) -> bytes:
    """A frame that frees no slots, up to its inline buffers, of which there are so many bytes."""
    table = b"".join(ONE_ROW.pack(*row) for row in rows)
    total = len(table) + len(note) + len(meta) + inline
    counts = (len(note), len(rows), 0, len(meta), total)
    return b"".join((HEADER.pack(kind, 0, *counts, seq, ack, call_id), table, note, meta))


def check_header(
    kind: int,
    buffers: int,
    freed: int,
    note_length: int,
    meta_length: int,
    total: int,
    limits: FrameLimits,
) -> None:
    """Refuse a header whose numbers do not agree or pass the limits."""
    if kind not in KINDS:
        raise CodecError(f"a frame of unknown kind {kind} arrived: the stream is not telegrad's")
    if buffers > limits.buffers or freed > limits.buffers:
        raise CodecError(
            f"a frame with {max(buffers, freed)} rows passes the limit {limits.buffers}"
        )
    if note_length + meta_length > limits.meta_bytes:
        raise CodecError(
            f"a frame with {note_length + meta_length} bytes of metadata passes the limit "
            f"{limits.meta_bytes}"
        )
    if total > limits.frame_bytes:
        raise CodecError(f"a frame of {total} bytes passes the limit {limits.frame_bytes}")
    if ROW * buffers + SLOT * freed + note_length + meta_length > total:
        raise CodecError("a frame's parts are longer than the frame")
