"""Sizes, texts and buffers: what both halves of a message, table and tree, are written with.

A size is one byte below 255; 255 announces eight more. Every size that a reader takes is
compared with the bytes that are left before anything is allocated for it, so a message can
never ask for more memory than it has itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from telegrad.wire.errors import CodecError

_LONG = 255
_U64 = Struct("<Q")


ByteBuffer: TypeAlias = bytearray | memoryview | npt.NDArray[np.uint8]
"""Writable bytes in one dimension."""


def write_size(out: bytearray, size: int) -> None:
    if size < _LONG:
        out.append(size)
    else:
        out.append(_LONG)
        out += _U64.pack(size)


def write_text(out: bytearray, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    if len(data) < _LONG:
        out.append(len(data))
    else:
        write_size(out, len(data))
    out += data


class Reader:
    """A position in a message's metadata, and the buffers that came with it."""

    __slots__ = ("buffers", "data", "position", "taken")

    def __init__(self, data: bytes, buffers: Sequence[ByteBuffer]) -> None:
        self.data = data
        self.position = 0
        self.buffers = buffers
        self.taken = 0

    def size(self) -> int:
        position = self.position
        size = self.data[position]
        if size < _LONG:
            self.position = position + 1
            return size
        self.position = position + 9
        return int(_U64.unpack_from(self.data, position + 1)[0])

    def count(self, limit: int, what: str) -> int:
        """A size that announces as many things, each of which takes at least one byte."""
        count = self.size()
        if count > len(self.data) - self.position:
            raise CodecError(f"the message announces {count} {what} and ends before them")
        if count > limit:
            raise CodecError(f"the message holds {count} {what}, more than the limit of {limit}")
        return count

    def take(self, size: int) -> bytes:
        position = self.position
        end = position + size
        if end > len(self.data):
            raise CodecError(f"the message ends {end - len(self.data)} bytes too early")
        self.position = end
        return self.data[position:end]

    def chunk(self) -> bytes:
        """A size, and as many bytes."""
        data, start = self.data, self.position + 1
        size = data[start - 1]
        if size == _LONG:
            return self.take(self.size())
        self.position = end = start + size
        if end > len(data):
            raise CodecError(f"the message ends {end - len(data)} bytes too early")
        return data[start:end]

    def text(self) -> str:
        return str(self.chunk(), "utf-8", "surrogatepass")

    def next_buffer(self) -> ByteBuffer:
        """Buffers are used in the order in which they travel, each at least once."""
        taken = self.taken
        if taken >= len(self.buffers):
            raise CodecError(f"the message needs more than the {taken} buffers that came with it")
        self.taken = taken + 1
        return self.buffers[taken]
