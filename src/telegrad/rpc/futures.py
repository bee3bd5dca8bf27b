"""The future of a call: a `torch.futures.Future` that reads its own reply."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.node import Node
from telegrad.rpc.torch_private import fail_future
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.codec import Packed

_thread = threading.local()
S = TypeVar("S")


def runs_callbacks() -> bool:
    """Whether the calling thread is in a callback of one of our futures."""
    return getattr(_thread, "settles", False)


def _refuse() -> None:
    raise TelegradError(
        "A future that was made outside of a compiled function cannot be waited for in it, nor "
        "asked for anything: wait before, and pass the result."
    )


class CallFuture(torch.futures.Future[Any]):
    """What `rpc_async` returns.

    It is a `torch.futures.Future`, works with `then`, `add_done_callback`, `torch.futures.wait_all`
    and `collect_all`, and can be awaited in a coroutine. A thread that waits for it reads the reply
    itself, without another thread in between.
    """

    _pending: Pending
    _node: Node

    def wait(self) -> Any:
        if is_dynamo_compiling():
            _refuse()
        pending = self._pending
        if not super().done():
            self._node.transport.wait(pending)
            pending.complete()
        return super().wait()

    def done(self) -> bool:
        if is_dynamo_compiling():
            _refuse()
        return super().done()

    def value(self) -> Any:
        if is_dynamo_compiling():
            _refuse()
        return super().value()

    def then(self, callback: Callable[[Any], S]) -> torch.futures.Future[S]:
        if is_dynamo_compiling():
            _refuse()
        self._press()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if is_dynamo_compiling():
            _refuse()
        self._press()
        super().add_done_callback(callback)

    def _press(self) -> None:
        """There is a callback: the reply is not to be kept until somebody asks for it."""
        pending = self._pending
        pending.pressing = True
        # Who reads it sets `done` and then looks whether it is pressing: one sees the other.
        if pending.done:
            pending.complete()

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def done(_: torch.futures.Future[Any]) -> None:
            # A loop that has ended has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(done)
        yield from waiter.__await__()
        return self.wait()


def begin_async(
    node: Node,
    to: WorkerInfo,
    target: object,
    args: tuple[Any, ...] | list[Any],
    kwargs: dict[str, Any] | None,
    timeout: float | None,
    message: Packed | None = None,
) -> CallFuture:
    """Begin a call and give its future. `message` is what is to be sent, if it was written."""
    future = CallFuture()

    def settle(pending: Pending) -> None:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            finish(pending)
            return
        # A thread that happens to wait runs the callbacks: its modes are none of theirs.
        with torch.inference_mode(False):
            finish(pending)

    def finish(pending: Pending) -> None:
        outer, _thread.settles = runs_callbacks(), True
        try:
            value = node.outcome(pending)
        except BaseException as error:
            fail_future(future, error)
        else:
            future.set_result(value)
        finally:
            _thread.settles = outer

    future._node = node
    future._pending = pending = node.call(to, target, args, kwargs, timeout, settle, message)
    pending.pressing = False
    return future
