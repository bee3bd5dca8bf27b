"""Where `async def` functions run: an event loop on a thread of its own, made when first needed.

If code on the loop blocks in a call of ours instead of awaiting it, coroutines that arrive
meanwhile get a fresh loop: a blocked loop delays its own tasks, never those of others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

Finish = Callable[[object, "BaseException | None"], None]


class Coroutines:
    """Runs coroutines and tells what became of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._spare: list[asyncio.AbstractEventLoop] = []

    def start(self, coroutine: Coroutine[Any, Any, object]) -> Callable[[Finish], None]:
        """A function that starts the coroutine in the caller's context variables."""
        context = copy_context()

        def subscribe(finish: Finish) -> None:
            loop = self._running_loop()

            def begin() -> None:
                task = loop.create_task(_outcome(coroutine), context=context)
                task.add_done_callback(lambda done: _report(done, finish))

            loop.call_soon_threadsafe(begin)

        return subscribe

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None and self._spare:
                self._loop = self._spare.pop()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loops.append(self._loop)
                threading.Thread(
                    target=self._loop.run_forever, name="telegrad-coroutines", daemon=True
                ).start()
            return self._loop

    def blocking(self) -> None:
        """The calling thread is about to block: if it is our loop's, use another from now on."""
        if not self._loops:
            return
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

    def _came_back(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if loop in self._loops and loop is not self._loop:
                self._spare.append(loop)

    def close(self) -> None:
        with self._lock:
            loops, self._loops, self._loop = self._loops, [], None
            self._spare.clear()
        for loop in loops:
            loop.call_soon_threadsafe(loop.stop)


async def _outcome(
    coroutine: Coroutine[Any, Any, object],
) -> tuple[object, BaseException | None]:
    """What became of a coroutine. SystemExit and the like must not end the loop that others use."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


def _report(task: asyncio.Task[tuple[object, BaseException | None]], finish: Finish) -> None:
    if task.cancelled():
        finish(None, asyncio.CancelledError("the coroutine was cancelled"))
    else:
        finish(*task.result())
