"""What the workers of a job that takes data only run for each other, and what they must not."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

import telegrad
from telegrad import rpc

ran: list[str] = []
_weights: dict[str, torch.Tensor] = {"w": torch.ones(3, requires_grad=True)}
_gate = threading.Event()


@telegrad.export
def scale(x: Any) -> Any:
    return x * 2


@telegrad.export
def weigh(x: torch.Tensor) -> torch.Tensor:
    return (x * _weights["w"]).sum()


@telegrad.export
def square_weight_there(to: str, x: torch.Tensor) -> torch.Tensor:
    """Another worker is given a gradient that can be differentiated in turn."""
    weight: torch.Tensor = rpc.rpc_sync(to, weigh, args=(x,))
    return weight * weight


@telegrad.export
def weight_gradient(context_id: int) -> torch.Tensor:
    gradients = telegrad.autograd.get_gradients(context_id)
    return gradients[_weights["w"]]


@telegrad.export
def fail_with(text: str) -> None:
    raise KeyError(text)


waiting = 0


@telegrad.export
def wait_for_gate() -> str:
    global waiting
    waiting += 1
    _gate.wait(30)
    waiting -= 1
    return "through"


@telegrad.export
def weigh_and_wait(x: torch.Tensor) -> int:
    wait_for_gate()
    return x.numel()


@telegrad.export
def open_gate() -> None:
    _gate.set()


def forbidden(*args: Any) -> str:
    ran.append("forbidden")
    return "ran"


def what_ran() -> list[str]:
    return list(ran)


@telegrad.export
class Counter:
    """Exported: others may make one, and call those of its methods that are exported too."""

    def __init__(self, start: int) -> None:
        self.count = start
        self.hook = forbidden

    @telegrad.export
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def reset(self) -> None:
        ran.append("reset")
        self.count = 0


@telegrad.export
@dataclass
class Task:
    """Data that could be called, but was not exported as a function."""

    name: str

    def __call__(self) -> str:
        ran.append("task")
        return self.name


class Bomb:
    """Unpickling it leaves a trace."""

    def __reduce__(self) -> Any:
        return forbidden, ()


class BombError(Exception):
    def __reduce__(self) -> Any:
        return forbidden, ()


@telegrad.export
def raise_bomb() -> None:
    raise BombError("no pickle")


@telegrad.export
def give_reference(start: int) -> rpc.RRef[Counter]:
    return rpc.RRef(Counter(start))


@telegrad.export
def count_of(rref: rpc.RRef[Counter]) -> int:
    return rref.local_value().count


@telegrad.export
async def wait_at_gate() -> str:
    while not _gate.is_set():
        await asyncio.sleep(0.01)
    return "through"


_given: list[Any] = []


@telegrad.export
def take(*given: Any) -> int:
    """Keep what came."""
    _given.extend(given)
    return len(_given)


@telegrad.export
def drop_all() -> None:
    _given.clear()


@telegrad.export
def pass_on(count: int, rref: Any) -> list[Any]:
    return [rref] * count


@telegrad.export
async def scale_in_a_while(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0.01)
    return x * 2


@telegrad.export
def scale_slowly(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return x * 2
