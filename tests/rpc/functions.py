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
kept: Any = None
shelf: dict[str, Any] = {}
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


_told: list[str] = []


def who_am_i() -> str:
    _told.append("")
    return rpc.get_worker_info().name


def calls_of_who_am_i() -> int:
    return len(_told)


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


class NeedsTwo(Exception):
    """Its constructor takes two arguments and its `args` hold one."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code
        self.where = where


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class Garbled(Exception):
    """Made from its `args` again it says something else."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class BreaksWhenRebuilt(Exception):
    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise OSError("this error does not want to be rebuilt")


def local_error() -> Exception:
    class Local(Exception):
        """Nobody can import it."""

    return Local("made inside of a function")


class GateShut(RuntimeError, ConnectionError):
    """Both are classes of Python; only the second has something to fill."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{code} at {place} shut")


class DiskFull(OSError):
    """Python keeps the file of an OSError apart from its `args`."""

    def __init__(self, file: str) -> None:
        super().__init__(28, "No space left", file)


class BadText(UnicodeDecodeError):
    """Its words are made of what the built-in class keeps outside of `args`."""

    def __init__(self, where: str) -> None:
        super().__init__("utf-8", b"a", 0, 1, where)


class Tagged(ExceptionGroup[Exception]):
    """It is made by a `__new__` of its own."""

    tag: int

    def __new__(cls, tag: int) -> Tagged:
        made = super().__new__(cls, "tagged", [ValueError("a")])
        made.tag = tag
        return made


class Secretive(Exception):
    """Whoever asks for its attributes fails."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")

    def __getattribute__(self, name: str) -> object:
        if name in ("__dict__", "args"):
            raise RuntimeError("it is a secret")
        return super().__getattribute__(name)


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def raise_named(name: str) -> None:
    makers: dict[str, Any] = {
        "needs two": lambda: NeedsTwo(7, "gate"),
        "holds lock": HoldsLock,
        "gate shut": lambda: GateShut(7, "gate"),
        "disk full": lambda: DiskFull("/disk"),
        "bad text": lambda: BadText("up"),
        "tagged": lambda: Tagged(7),
        "secretive": lambda: Secretive(7, "gate"),
        "garbled": lambda: Garbled(7),
        "keyword": lambda: Keyword(code=7),
        "unprintable": Unprintable,
        "breaks": BreaksWhenRebuilt,
        "local": local_error,
        "interrupt": lambda: KeyboardInterrupt("stop"),
        "exit": lambda: SystemExit(3),
        "group": lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        "surrogate": lambda: ValueError("bad text \ud800"),
        "tensor": lambda: ValueError("with a tensor", torch.ones(100_000)),
        "stop iteration": lambda: StopIteration(4),
        "assertion": lambda: AssertionError("no"),
        "os error": lambda: FileNotFoundError(2, "No such file", "/nowhere"),
    }
    raise makers[name]()


def raise_with_cause() -> None:
    try:
        raise_value_error("the first")
    except ValueError as error:
        raise KeyError("the second") from error


def raise_at(path: list[str]) -> None:
    """Fail on the last worker of a path of nested calls."""
    if len(path) > 1:
        rpc.rpc_sync(path[1], raise_at, args=(path[1:],))
    raise LookupError(f"on {path[0]}")


def recurse_for_ever(n: int) -> int:
    return recurse_for_ever(n + 1)


def give_unsendable() -> Any:
    return threading.Lock()


def give_unsendable_inside() -> Any:
    return {"k": [threading.Lock()]}


class FailsToPickle:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("while pickling")


class FailsToArrive:
    def __reduce__(self) -> Any:
        return (_refuse, ())


def give_unreadable() -> Any:
    return FailsToArrive()


@rpc.functions.async_execution
async def marked_without_need() -> int:
    return 3


async def add_as_coroutine(x: Any, y: Any) -> Any:
    return x + y


async def call_from_coroutine(to: str, x: Any) -> Any:
    first = await rpc.rpc_async(to, torch.add, args=(x, 1))
    second = await rpc.rpc_async(to, add_as_coroutine, args=(first, 1))
    return second


async def block_in_coroutine(to: str) -> str:
    return str(rpc.rpc_sync(to, who_am_i))


async def fail_in_coroutine() -> None:
    raise LookupError("in a coroutine")


async def wait_in_coroutine(begun: str, name: str) -> str:
    import asyncio

    set_event(begun)
    while not event(name).is_set():
        await asyncio.sleep(0.001)
    return name


@rpc.functions.async_execution
def add_on_another(to: str, x: Any, y: Any) -> torch.futures.Future[Any]:
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + 1)


@rpc.functions.async_execution
def future_that_fails(to: str) -> torch.futures.Future[Any]:
    return rpc.rpc_async(to, raise_value_error, args=("from afar",))


@rpc.functions.async_execution
def no_future() -> int:
    return 3


@rpc.functions.async_execution
def chain(path: list[str]) -> torch.futures.Future[Any]:
    if not path:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(0)
        return future
    return rpc.rpc_async(path[0], chain, args=(path[1:],)).then(lambda f: f.wait() + 1)


def nothing_with(value: Any) -> None:
    """Takes what is sent, and gives nothing."""
