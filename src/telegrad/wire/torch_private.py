"""The torch functions without a public name that the codec relies on, one function each."""

from __future__ import annotations

import torch


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values as they lie; the public accessors refuse what is not coalesced."""
    return tensor._indices(), tensor._values()


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether it is one of autograd's zeros that have a shape and no memory."""
    return bool(tensor._is_zerotensor())


def quantized(numbers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """The inverse of `int_repr` for one scale; quantizing anew would round a second time."""
    return torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)


def quantized_by_channel(
    numbers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
) -> torch.Tensor:
    """The inverse of `int_repr` for one scale per channel."""
    return torch._make_per_channel_quantized_tensor(numbers, scales, zero_points, axis)
