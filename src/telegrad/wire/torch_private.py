"""What this room relies on in torch without a public name, one function each."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed import Store  # type: ignore[attr-defined]

_CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
_NO_LIMIT = timedelta(days=1)


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values as they lie; the public accessors refuse what is not coalesced."""
    return tensor._indices(), tensor._values()


is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether it is one of autograd's zeros that have a shape and no memory."""


is_functional: Callable[[torch.Tensor], bool] = torch._is_functional_tensor
"""Whether it stands for another tensor: its own memory, of which torch speaks freely, is not there.
So it is inside of `torch.func.functionalize`."""


def in_dual_level() -> bool:
    """Whether tensors may have tangents: inside of `torch.autograd.forward_ad.dual_level()`."""
    return forward_ad._current_level >= 0


def quantized(numbers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """The inverse of `int_repr` for one scale; quantizing anew would round a second time."""
    return torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)


def quantized_by_channel(
    numbers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
) -> torch.Tensor:
    """The inverse of `int_repr` for one scale per channel."""
    return torch._make_per_channel_quantized_tensor(numbers, scales, zero_points, axis)


def has_backend(name: str) -> bool:
    """Whether this build of torch has the class behind a backend's name."""
    return hasattr(dist, _CLASSES[name])


def group_of_two(backend: str, store: Store, rank: int, host: str) -> Any:
    """A process group that torch.distributed does not know of: public ones need a default group.

    Its `send([tensor], rank, tag)` and `recv` give a `dist.Work`. gloo listens at `host`.
    """
    if backend == "gloo":
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _NO_LIMIT
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, 2, options)
    group = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
    # The store is gone when the first tensor comes.
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
