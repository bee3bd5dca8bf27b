"""The short cuts of `_native.c`, where that was built; else the long way for everything.

They take the messages that nearly all traffic consists of. Their bytes are those that the codec and
`frames` would write and accept, so workers with and without them understand each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from telegrad.wire.frames import Frame, whole
from telegrad.wire.packed import NOT_QUICK, Packed
from telegrad.wire.primitives import ByteBuffer
from telegrad.wire.trust import Limits, Trust


def pack(obj: Any, trust: Trust) -> Packed | None:
    """The message, if it is of one of the quick forms."""
    return None


def unpack(
    meta: bytes,
    buffers: Sequence[ByteBuffer],
    trust: Trust,
    limits: Limits,
    arrive: Callable[[list[Tensor]], list[Tensor]] | None,
) -> Any:
    """What the message holds, or `NOT_QUICK`."""
    return NOT_QUICK


frame = whole


def next_frame(
    window: memoryview, start: int, end: int, most: int
) -> tuple[Frame, int, int, int] | None:
    """The frame at the start of what was read, its number, its acknowledgement and its size, if all
    of it is there and it has at most so many bytes, each of them its own."""
    return None


BUILT = False
"""Whether the compiled ones are used."""

try:
    from telegrad.wire import _native
except ImportError:
    pass
else:
    pack, unpack = _native.pack, _native.unpack
    frame, next_frame = _native.frame, _native.next_frame
    BUILT = True
