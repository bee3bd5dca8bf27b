"""Where `async def` functions run: an event loop on a thread of its own, made when first needed.

If code on the loop blocks in a call of ours instead of awaiting it, coroutines that have not begun
go to a fresh loop, and so do those that arrive meanwhile. A blocked loop delays only coroutines
that have begun on it: those do not move.

That is why what is to begin waits in a queue of ours rather than in a loop's. A coroutine sends its
call before it blocks, and the answer may need another coroutine here: were that one given to the
loop in between, it would wait for the very call that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from functools import partial
from typing import Any

import torch

Finish = Callable[[object, "BaseException | None"], None]
Begin = Callable[[asyncio.AbstractEventLoop], None]

TIME_TO_END = 1.0
"""What coroutines that are cancelled when their worker leaves have for their `finally`."""


class Coroutines:
    """Runs coroutines and tells what became of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.loops: list[asyncio.AbstractEventLoop] = []
        self._spare: list[asyncio.AbstractEventLoop] = []
        self._waiting: deque[Begin] = deque()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> Callable[[Finish], None]:
        """A function that starts the coroutine in the caller's context variables and grad mode."""
        context, grad = copy_context(), torch.is_grad_enabled()

        def subscribe(finish: Finish) -> None:
            def begin(loop: asyncio.AbstractEventLoop) -> None:
                task = loop.create_task(_outcome(coroutine, grad), context=context)
                task.add_done_callback(lambda done: _report(done, finish))

            self._waiting.append(begin)
            try:
                loop = self._running_loop()
            except RuntimeError:
                # No thread can be had. Its caller is told so, unless another loop has begun it.
                with contextlib.suppress(ValueError):
                    self._waiting.remove(begin)
                    raise
                return
            self._begin_soon(loop)

        return subscribe

    def _begin_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._begin_next, loop)

    def _begin_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin one: it may block, and then the next has to begin elsewhere."""
        try:
            begin = self._waiting.popleft()
        except IndexError:
            return  # On another loop.
        begin(loop)
        if self._waiting:
            loop.call_soon(self._begin_next, loop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None and self._spare:
                self._loop = self._spare.pop()
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    threading.Thread(
                        target=_run, args=(loop,), name="telegrad-coroutines", daemon=True
                    ).start()
                except RuntimeError:
                    loop.close()
                    raise
                self._loop = loop
                self.loops.append(loop)
            return self._loop

    def run_here(self) -> bool:
        """Whether the calling thread runs a coroutine of ours."""
        if not self.loops:
            return False
        try:
            return asyncio.get_running_loop() in self.loops
        except RuntimeError:
            return False

    def blocking(self) -> None:
        """The calling thread is about to block: if it is our loop's, use another from now on."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        with self._lock:
            if running is not self._loop:
                return
            self._loop = None
        # The loop gets to this when the blocking call has ended.
        running.call_soon(self._came_back, running)
        # If no thread can be had, those that wait begin when this loop comes back.
        with contextlib.suppress(RuntimeError):
            self._move_waiting()

    def _move_waiting(self) -> None:
        if self._waiting:
            self._begin_soon(self._running_loop())

    def _came_back(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if loop not in self.loops or loop is self._loop:
                return
            self._spare.append(loop)
        self._move_waiting()

    def close(self) -> None:
        with self._lock:
            loops, self.loops, self._loop = self.loops, [], None
            self._spare.clear()
        for loop in loops:
            loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=TIME_TO_END))
    finally:
        loop.close()


async def _outcome(
    coroutine: Coroutine[Any, Any, object], grad: bool
) -> tuple[object, BaseException | None]:
    """What became of a coroutine. SystemExit and the like must not end the loop that others use."""
    try:
        return await _in_its_own_mode(coroutine, grad), None
    except BaseException as error:
        return None, error


@types.coroutine
def _in_its_own_mode(
    coroutine: Coroutine[Any, Any, object], grad: bool
) -> Generator[Any, Any, object]:
    """Run a coroutine with a grad mode that it has for itself: torch's is that of the thread, and
    one that awaits inside of `no_grad` would leave it to whichever goes on meanwhile."""
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        mode = torch.is_grad_enabled()
        torch.set_grad_enabled(grad)
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        finally:
            grad = torch.is_grad_enabled()
            torch.set_grad_enabled(mode)
        try:
            step = partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = partial(coroutine.throw, error)


def _report(task: asyncio.Task[tuple[object, BaseException | None]], finish: Finish) -> None:
    if task.cancelled():
        finish(None, asyncio.CancelledError("the coroutine was cancelled"))
    else:
        finish(*task.result())
