"""What the tests of this room call on other workers."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from telegrad import autograd, rpc

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3))
_calls: list[str] = []
_both_here = threading.Barrier(2)


def layer(a: Tensor, b: Tensor) -> Tensor:
    _log("layer", a)
    return (a * b) @ WEIGHT


FROZEN = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3), requires_grad=False)


def thaw(on: bool) -> None:
    FROZEN.requires_grad_(on)


def through_frozen(x: Tensor) -> Tensor:
    return x @ FROZEN


def picked_from_frozen(x: Tensor) -> Tensor:
    product = x @ FROZEN
    return product[product > 0]


def gradient_of_frozen(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(FROZEN)


def gradient_of_linear(module: nn.Linear, context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(module.weight)


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x * 2


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def with_a_number(x: Tensor) -> Any:
    return x, {"rest": [x, 3.5]}


def told_type(x: Tensor, given: Any) -> Tensor:
    _log(f"{type(given).__name__} {given!r}", x)
    return x * 1


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def difference(pair: Pair) -> Tensor:
    return pair.first - pair.second


def several(nested: dict[str, Any], *, scale: float = 1.0) -> Any:
    _log("several", nested["x"])
    x, (y, times) = nested["x"], nested["rest"]
    return x * y * scale, {"sum": [x.sum(0) * times], "where": y.argmax(-1), "nothing": None}


def halves(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2] * 2


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


def places(x: Tensor) -> Tensor:
    """What torch returns here has the strides of a transposed tensor."""
    return x.nonzero()


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, x.shape[0]))


def cut(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -1))


def resized(x: Tensor) -> Tensor:
    return F.interpolate(x[None, None], size=(x.shape[0] * 2, 3))


def parts(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return x.chunk(count)


def fail(x: Tensor) -> Tensor:
    if type(x) is Tensor:
        raise ValueError("the remote function failed")
    return x


def say(x: Tensor, word: str) -> Tensor:
    _log(word, x)
    return x * 1


def meet(x: Tensor) -> Tensor:
    """Returns when two calls of it are under way at the same time."""
    if type(x) is Tensor:
        _both_here.wait(20)
    return x * 2


def scaled(reference: Any, by: Tensor) -> Tensor:
    return reference.to_here() * by


def nested(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, layer, (x, x)) * 2


def doubled_in_place(x: Tensor, again: list[Tensor], y: Tensor) -> Tensor:
    """Changes its first argument, and looks at the second."""
    x.mul_(2)
    return x * again[0] + y


def number(x: Tensor) -> float:
    return 1.5


def slow(x: Tensor, seconds: float) -> Tensor:
    if type(x) is Tensor:
        time.sleep(seconds)
    return x * 2


def _log(what: str, x: Tensor) -> None:
    if type(x) in (Tensor, nn.Parameter):
        _calls.append(what)


def take_log() -> list[str]:
    taken = list(_calls)
    _calls.clear()
    return taken


def gradient_of_weight(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(WEIGHT)


class Norm(nn.Module):
    """Has state that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def counter(module: Norm) -> int:
    assert module.norm.num_batches_tracked is not None
    return int(module.norm.num_batches_tracked)


_release = threading.Event()


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        _release.wait(20)
        return gradient[0] * 2


def held(x: Tensor) -> Tensor:
    """Its backward takes until `release` is called."""
    return _Held.apply(x) if type(x) is Tensor else x * 2


def release() -> None:
    _release.set()


def referred(n: int) -> rpc.RRef[Tensor]:
    return rpc.RRef(torch.full((3, 3), float(n)))


_dimension = 0


def choose(dimension: int) -> None:
    """As if `summed` were redefined: its code is the same, what it returns is not."""
    global _dimension
    _dimension = dimension


def summed(x: Tensor) -> Tensor:
    return x.sum(_dimension)


def told(x: Tensor, constant: float) -> Tensor:
    _log(repr(constant), x)
    return x * 1


def turned(x: Tensor) -> Tensor:
    """Has other strides than its argument."""
    return x.t() * 2


def lies(x: Tensor) -> Tensor:
    """What the strides of the argument are."""
    return x * 0 + (1 if x.is_contiguous() else 2)


def weight_of(module: nn.Linear) -> Tensor:
    return module.weight * 1


COUNTED = torch.zeros(3)


def count() -> None:
    COUNTED.add_(1)


def call_back(x: Tensor) -> Tensor:
    """Changes a tensor of its caller's process."""
    if type(x) is Tensor:
        rpc.rpc_sync("main", count)
    return x * 1
