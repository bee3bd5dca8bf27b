"""What the workers of these tests are asked to run."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from telegrad import rpc

events: dict[str, threading.Event] = {}
"""Events of this worker, by name: tests wait for them and never for time."""
recorded: list[Any] = []
_making = threading.Lock()


def event(name: str) -> threading.Event:
    with _making:
        return events.setdefault(name, threading.Event())


def set_event(name: str) -> None:
    event(name).set()


def wait_event(name: str) -> str:
    assert event(name).wait(30), f"nobody set {name!r}"
    return name


def announce_and_wait(begun: str, name: str) -> str:
    set_event(begun)
    return wait_event(name)


def record(item: Any) -> int:
    recorded.append(item)
    return len(recorded)


def record_slowly(item: Any) -> None:
    recorded.append(item)
    time.sleep(0.005)


def take_recorded() -> list[Any]:
    taken = recorded[:]
    recorded.clear()
    return taken


def nothing() -> None:
    return None


def echo(value: Any) -> Any:
    return value


def echo_all(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def who_am_i() -> str:
    return rpc.get_worker_info().name


def sleep_for(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def bounce(depth: int, path: list[str]) -> int:
    """Call along the path of workers, one level deeper each time."""
    if depth == 0:
        return 0
    following = path[(path.index(who_am_i()) + 1) % len(path)]
    return 1 + int(rpc.rpc_sync(following, bounce, args=(depth - 1, path)))


def share_storage(pair: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Write through one of two tensors and tell what the other sees."""
    pair[0].fill_(7.0)
    return [float(x) for x in pair[1].flatten()]


@dataclass
class Point:
    x: int
    y: torch.Tensor
    tags: list[str] = field(default_factory=list)


class Account:
    """Something with state and every kind of method."""

    made = 0

    def __init__(self, balance: float = 0.0) -> None:
        self.balance = balance

    def add(self, amount: float) -> float:
        self.balance += amount
        return self.balance

    def fail(self) -> None:
        raise LookupError("no such account")

    async def add_soon(self, amount: float) -> float:
        return self.add(amount)

    @rpc.functions.async_execution
    def add_later(self, amount: float) -> torch.futures.Future[float]:
        future: torch.futures.Future[float] = torch.futures.Future()
        future.set_result(self.add(amount))
        return future

    @staticmethod
    def double(amount: float) -> float:
        return 2 * amount

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @staticmethod
    @rpc.functions.async_execution
    def double_later(to: str, amount: float) -> torch.futures.Future[float]:
        return rpc.rpc_async(to, Account.double, args=(amount,))

    @classmethod
    @rpc.functions.async_execution
    def double_class_later(cls, to: str, amount: float) -> torch.futures.Future[float]:
        return rpc.rpc_async(to, cls.double, args=(amount,))
