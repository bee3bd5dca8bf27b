"""What torch keeps per thread, and a module in the same process would therefore see by itself.

A remote call runs on another thread of another process: grad mode and autocast of the caller have
to travel with it. Grad mode is off, too, when the caller works in no autograd context: what is
recorded there no backward pass could reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

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


def ambient() -> Ambient | None:
    """Under what the calling thread calls modules; None if the call says it all by itself.

    A call that is made in a context takes the caller's grad mode along.
    """
    context = current_context()
    if context is not None and not any(map(torch.is_autocast_enabled, _device_types())):
        return None
    regions = tuple(_autocast_regions())
    return Ambient(torch.is_grad_enabled() and context is not None, regions)


def _autocast_regions() -> Iterator[Autocast]:
    for device_type in _device_types():
        if torch.is_autocast_enabled(device_type):
            yield Autocast(
                device_type,
                torch.get_autocast_dtype(device_type),
                torch.is_autocast_cache_enabled(),
            )


@cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def under(around: Ambient | None) -> AbstractContextManager[object]:
    """What `ambient` said, for the block, on the calling thread."""
    return nullcontext() if around is None else around.restored()
