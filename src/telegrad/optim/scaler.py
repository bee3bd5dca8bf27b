"""Loss scaling for half precision: whether to skip a step is decided over all workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor

from telegrad.nn.lazy import Lazy
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.errors import OptimizerError
from telegrad.optim.treatment import Scale
from telegrad.rpc.outside import outside_of_graphs

Key = tuple[int, int | None]
"""An optimizer by its identity, and a context."""


class GradScaler:
    """As `torch.amp.GradScaler`, for gradients that lie on many workers.

        with telegrad.autograd.context() as context_id:
            telegrad.autograd.backward(context_id, [scaler.scale(loss)])
            scaler.step(optimizer, context_id)
        scaler.update()

    If a gradient on any worker has an infinity or a NaN, no worker steps. `unscale_` before
    clipping, if you clip. Asking the workers takes one round trip per step. The device is there
    because torch has it: gradients are looked at where they are.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(device, str | torch.device):
            raise TypeError(
                f"The first argument of a scaler is a device, as torch's has it, not {device!r}: "
                "give init_scale by its name."
            )
        if growth_factor <= 1.0:
            raise ValueError(f"growth_factor must be above 1, not {growth_factor}")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be between 0 and 1, not {backoff_factor}")
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        self._finite: dict[Key, bool] = {}
        """Of each optimizer and context since `update`: whether all gradients are finite."""
        self._unscaling: dict[Key, Scale] = {}
        """How the optimizer is to unscale them, unless it was told to drop them meanwhile."""
        self._stepped: set[Key] = set()

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = new_interval

    @overload
    def scale(self, loss: Tensor) -> Tensor: ...
    @overload
    def scale(self, loss: Lazy[Any]) -> Lazy[Any]: ...
    @overload
    def scale(self, loss: Iterable[Any]) -> list[Any]: ...
    def scale(self, loss: Any) -> Any:
        """The loss, or each of several, from which to run backward. A lazy one stays lazy."""
        if not self._enabled and isinstance(loss, Tensor | Lazy):
            return loss
        # A tensor, not a number: with it a loss in half precision becomes one in single precision.
        if isinstance(loss, Tensor):
            return loss * torch.tensor(self._scale, device=loss.device)
        if isinstance(loss, Lazy):
            return loss.then(_scaled, self._scale)
        if isinstance(loss, Iterable) and not isinstance(loss, str):
            scaled = map(self.scale, loss)
            return tuple(scaled) if isinstance(loss, tuple) else list(scaled)
        raise TypeError(f"A loss is a tensor or a Lazy, or a list of them, not {loss!r:.100}.")

    @outside_of_graphs
    def unscale_(self, optimizer: DistributedOptimizer, context_id: int | None) -> None:
        """Divide the gradients of the next step by the scale, so that they can be clipped."""
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                f"This scaler is for a DistributedOptimizer; for {type(optimizer).__name__} there "
                "is torch.amp.GradScaler."
            )
        if not self._enabled:
            return
        key = (id(optimizer), context_id)
        if self._is_unscaled(optimizer, context_id):
            raise OptimizerError(
                "unscale_() has already been called for this optimizer and context since update()."
            )
        self._finite[key] = optimizer.all_finite(context_id)
        self._unscaling[key] = Scale(1.0 / self._scale)
        optimizer.treat(context_id, self._unscaling[key])

    def _is_unscaled(self, optimizer: DistributedOptimizer, context_id: int | None) -> bool:
        asked = self._unscaling.get((id(optimizer), context_id))
        if asked is None:
            return False
        return any(each is asked for each in optimizer.treatments(context_id))

    @outside_of_graphs
    def step(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> bool:
        """Step, unless a gradient on any worker is not finite. Whether the step was made."""
        if not self._enabled:
            optimizer.step(context_id)
            return True
        key = (id(optimizer), context_id)
        if key in self._stepped:
            raise OptimizerError(
                "step() has already been called for this optimizer and context since update()."
            )
        if not self._is_unscaled(optimizer, context_id):
            self.unscale_(optimizer, context_id)
        if self._finite[key]:
            # If it fails and is undone, the optimizer still has to unscale them.
            optimizer.step(context_id)
        else:
            optimizer.give_up(context_id)
        self._stepped.add(key)
        return self._finite[key]

    @outside_of_graphs
    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale, once after each iteration."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._finite:
            raise OptimizerError(
                "update() comes after step(): no gradients have been looked at since the last one."
            )
        elif not all(self._finite.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._finite.clear()
        self._unscaling.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """The same keys as torch's."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    @outside_of_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._enabled:
            return
        if not state_dict:
            raise OptimizerError(
                "The state to load is empty: it was saved by a scaler that was not enabled."
            )
        self._scale = float(state_dict["scale"])
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._growth_tracker = int(state_dict["_growth_tracker"])


def _scaled(loss: Tensor, scale: float) -> Tensor:
    return loss * torch.tensor(scale, device=loss.device)
