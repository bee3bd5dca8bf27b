"""What the uses of the compile report call on workers, telegrad's and stock torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3))


def layer(a: Tensor, b: Tensor) -> Tensor:
    return (a * b) @ WEIGHT


def several(d: dict[str, Any]) -> Any:
    return d["x"] * 2, {"sum": d["x"].sum(0)}


def halves(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2] * 2


def positive(x: Tensor) -> Tensor:
    return x[x > 0]
