"""The short cuts of `_native.cpp`, where that was built; else the long way for everything.

They take the messages that nearly all traffic consists of. Their bytes are those that the codec and
`frames` would write and accept, so workers with and without them understand each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from telegrad import native
from telegrad.wire.connection import Connection, Turn
from telegrad.wire.frames import Frame
from telegrad.wire.packed import NOT_QUICK, Packed
from telegrad.wire.primitives import ByteBuffer
from telegrad.wire.trust import Limits, Trust


def pack(obj: Any, trust: Trust) -> Packed | None:
    """The message, if it is of one of the quick forms."""
    return None


def unpack(
    meta: bytes | bytearray | memoryview,
    buffers: Sequence[ByteBuffer],
    trust: Trust,
    limits: Limits,
    arrive: Callable[[list[Tensor]], list[Tensor]] | None,
) -> Any:
    """What the message holds, or `NOT_QUICK`."""
    return NOT_QUICK


def depart(
    link: Connection,
    kind: int,
    call_id: int,
    note: bytes,
    meta: bytes,
    buffers: Sequence[memoryview],
    rows: Sequence[int] | None,
    most: int,
) -> tuple[Turn, int | None] | Literal[True] | None:
    """Number a frame, keep it and write it, if nobody else writes and nothing else is on the queue,
    and it has less than so many bytes. `rows` are the numbers of its table, if some of its buffers
    are in shared memory; those that are given go inline. What waits to be given back goes along.

    True: it is done. Else its sender has become the writer, of the turn, and so many bytes are
    written: some, all with others to be told, -1 if the stream has ended, None if that is still to
    be tried.
    """
    return None


def arrive(link: Connection, frames: int, bytes_: int) -> Frame | Literal[False] | None:
    """The next frame, if all of it is in the window or in shared memory, and new, and fewer frames
    and bytes than these are owed an acknowledgement then. An empty window is filled before. False:
    nothing came in the time for it."""
    return None


_native = native.compiled("telegrad.wire._native")

BUILT = _native is not None
"""Whether the compiled ones are used."""

if _native is not None:
    pack, unpack, depart, arrive = _native.pack, _native.unpack, _native.depart, _native.arrive
