"""What the codec makes of an object, whichever of its ways the object took."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    meta: bytes
    tensors: list[Tensor]
    """The tensors of the message in table order, as the caller holds them."""
    buffers: list[memoryview]
    """C-contiguous bytes to be sent behind the metadata, none of them empty."""
    untracked: int = 0
    """So many of the buffers, the last ones, are of other objects: those have no version counter
    that would tell later whether they were changed."""


NOT_QUICK: Any = object()
"""What `quick.unpack` gives for a message that is not of its forms."""
