"""The short cuts of `_native.cpp`, where that was built; else the long way for everything.

They take the messages that nearly all traffic consists of. Their bytes are those that the codec and
`frames` would write and accept, so workers with and without them understand each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from telegrad.wire.connection import Connection, Turn
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


def depart(
    link: Connection,
    kind: int,
    call_id: int,
    note: bytes,
    meta: bytes,
    buffers: Sequence[memoryview],
    most: int,
) -> Turn | None:
    """Number a frame and keep it; what its writer has to write, if its sender has become that, and
    nothing else is on the queue, and the frame has less than so many bytes, all of them inline."""
    return None


def arrive(link: Connection, frames: int, bytes_: int) -> Frame | None:
    """The next frame, if all of it is in the window, inline, and new, and fewer frames and bytes
    than these are owed an acknowledgement then."""
    return None


BUILT = False
"""Whether the compiled ones are used."""

try:
    from telegrad.wire import _native
except ImportError:
    pass
else:
    pack, unpack = _native.pack, _native.unpack
    frame, depart, arrive = _native.frame, _native.depart, _native.arrive
    BUILT = True
