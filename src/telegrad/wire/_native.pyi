from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from telegrad.wire.connection import Connection, Turn
from telegrad.wire.frames import Frame
from telegrad.wire.packed import Packed
from telegrad.wire.primitives import ByteBuffer
from telegrad.wire.trust import Limits, Trust

def pack(obj: Any, trust: Trust) -> Packed | None: ...
def unpack(
    meta: bytes | bytearray | memoryview,
    buffers: Sequence[ByteBuffer],
    trust: Trust,
    limits: Limits,
    arrive: Callable[[list[Tensor]], list[Tensor]] | None,
) -> Any: ...
def depart(
    link: Connection,
    kind: int,
    call_id: int,
    note: bytes,
    meta: bytes,
    buffers: Sequence[memoryview],
    rows: Sequence[int] | None,
    most: int,
) -> tuple[Turn, int | None] | Literal[True] | None: ...
def arrive(link: Connection, frames: int, bytes_: int) -> Frame | Literal[False] | None: ...
