"""What torch keeps per thread, and a module in the same process would therefore see by itself.

A remote call runs on another thread of another process: grad mode and autocast of the caller have
to travel with it. Grad mode is off, too, when the caller works in no autograd context: what is
recorded there no backward pass could reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

from telegrad.autograd.context import current_context


@dataclass(frozen=True, slots=True)
class Autocast:
    """One `torch.autocast` region that is in force."""

    device_type: str
    dtype: torch.dtype
    cache_enabled: bool


@dataclass(frozen=True, slots=True)
class Ambient:
    """The grad mode and the autocast regions under which a module is called."""

    grad: bool
    autocast: tuple[Autocast, ...]

    def restored(self) -> AbstractContextManager[object]:
        """The same for the block, on the calling thread."""
        if self.autocast:
            return self._with_autocast()
        return torch.set_grad_enabled(self.grad)

    @contextmanager
    def _with_autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for region in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        region.device_type, region.dtype, cache_enabled=region.cache_enabled
                    )
                )
            yield


def ambient() -> Ambient:
    """Under what the calling thread calls modules."""
    recorded = torch.is_grad_enabled() and current_context() is not None
    return Ambient(recorded, tuple(_autocast_regions()))


def _autocast_regions() -> Iterator[Autocast]:
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    for device_type in device_types:
        if torch.is_autocast_enabled(device_type):
            yield Autocast(
                device_type,
                torch.get_autocast_dtype(device_type),
                torch.is_autocast_cache_enabled(),
            )
