"""An optimizer that fails on the workers that were told so."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

failing = False


def set_failing(fail: bool) -> None:
    global failing
    failing = fail


class FailsOnOrder(optim.SGD):
    """Updates its first group, and fails before the second where it was told to."""

    def step(self, closure: Any = None) -> Any:
        if not failing:
            return super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise ArithmeticError("told to fail")
