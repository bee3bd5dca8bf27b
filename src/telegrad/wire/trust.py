"""How far a peer is trusted, and how much of it is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Trust(Enum):
    """What a message may hold.

    `CODE`: anything that Python can import or pickle; whoever sends it may run code here.
    `DATA`: values only. Nothing is imported and nothing is pickled; functions and classes are
    those that this process exported.
    """

    CODE = "code"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that `unpack` enforces before it allocates."""

    meta: int = 1 << 30
    """Bytes of metadata: the tree, the tensor table and what is pickled."""
    depth: int = 200
    """Containers inside containers. Each costs one Python frame."""
    items: int = 1 << 26
    """Elements of one container."""
    tensors: int = 1 << 20
    """Entries of the tensor table."""
    dims: int = 64
    """Dimensions of one tensor; torch itself ends at 64."""
    tensor_bytes: int = (1 << 63) - 1
    """Bytes of the elements of one tensor, those of expanded dimensions counted each time."""


LIMITS = Limits()
