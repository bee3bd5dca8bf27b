"""A message that needs no tree: bytes in a form of their sender's own, and tensors.

Layers that speak often and always in the same few forms write them with `struct`. What is left for
the codec is the table of tensors. A parcel is a whole message: it has no place inside of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Parcel(NamedTuple):
    topic: str
    """To whom at the other end it goes."""
    data: bytes
    tensors: Sequence[torch.Tensor]
    """No tensor twice: it would arrive as two that share their memory."""
