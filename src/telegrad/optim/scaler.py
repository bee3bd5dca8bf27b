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


class GradScaler:
    """As `torch.amp.GradScaler`, for gradients that lie on many workers.

        with telegrad.autograd.context() as context_id:
            telegrad.autograd.backward(context_id, [scaler.scale(loss)])
            scaler.step(optimizer, context_id)
        scaler.update()

    If a gradient on any worker has an infinity or a NaN, no worker steps. `unscale_` before
    clipping, if you clip. Asking the workers takes one round trip per step.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
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
        self._finite: dict[tuple[int, int | None], bool] = {}
        self._found_inf = False

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    @overload
    def scale(self, loss: Tensor) -> Tensor: ...
    @overload
    def scale(self, loss: Lazy[Any]) -> Lazy[Any]: ...
    @overload
    def scale(self, loss: Iterable[Any]) -> list[Any]: ...
    def scale(self, loss: Any) -> Any:
        """The loss, or each of several, from which to run backward. A lazy one stays lazy."""
        if isinstance(loss, Tensor):
            return loss * self._scale if self._enabled else loss
        if isinstance(loss, Lazy):
            return loss.then(torch.mul, self._scale) if self._enabled else loss
        if isinstance(loss, Iterable):
            return [self.scale(each) for each in loss]
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
        if key in self._finite:
            raise OptimizerError(
                "unscale_() has already been called for this optimizer and context since update()."
            )
        self._finite[key] = optimizer.all_finite(context_id)
        optimizer.treat(context_id, Scale(1.0 / self._scale))

    @outside_of_graphs
    def step(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> bool:
        """Step, unless a gradient on any worker is not finite. Whether the step was made."""
        if not self._enabled:
            optimizer.step(context_id)
            return True
        key = (id(optimizer), context_id)
        if key not in self._finite:
            self.unscale_(optimizer, context_id)
        if self._finite.pop(key):
            optimizer.step(context_id)
            return True
        self._found_inf = True
        optimizer.zero_grad()
        return False

    @outside_of_graphs
    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale, once after each iteration."""
        if new_scale is not None:
            self._scale = float(new_scale)
        elif self._found_inf:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._found_inf = False
        self._finite.clear()

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
        self._scale = float(state_dict["scale"])
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._growth_tracker = int(state_dict["_growth_tracker"])
