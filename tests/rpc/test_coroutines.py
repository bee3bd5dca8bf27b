"""Coroutines on a worker: one that goes wrong is no other's trouble."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc import outgoing
from telegrad.rpc.coroutines import Coroutines
from tests.rpc import functions
from tests.rpc.fleet import Process

pytestmark = pytest.mark.usefixtures("workers")


async def leave() -> None:
    sys.exit(7)


async def say(word: str) -> str:
    return word


async def call_and_block(to: str) -> None:
    rpc.rpc_sync(to, functions.nothing)


def other_worker() -> str:
    return "worker1" if rpc.get_worker_info().name == "main" else "main"


async def await_back_and_forth(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + await rpc.rpc_async(other_worker(), await_back_and_forth, args=(depth - 1,))


async def block_back_and_forth(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + int(rpc.rpc_sync(other_worker(), block_back_and_forth, args=(depth - 1,)))


@rpc.functions.async_execution
def call_back_and_forth(depth: int) -> torch.futures.Future[int]:
    """Each call is made by a callback of another."""
    result: torch.futures.Future[int] = torch.futures.Future()
    if depth == 0:
        result.set_result(0)
        return result

    def go_on(_: object) -> None:
        deeper = rpc.rpc_async(other_worker(), call_back_and_forth, args=(depth - 1,))
        deeper.add_done_callback(lambda done: result.set_result(done.wait() + 1))

    rpc.rpc_async(other_worker(), functions.nothing).add_done_callback(go_on)
    return result


def allow_calls_in_flight(number: int) -> int:
    before, outgoing.MAX_CALLS_IN_FLIGHT = outgoing.MAX_CALLS_IN_FLIGHT, number
    return before


@pytest.fixture
def few_calls_in_flight(workers: dict[str, Process]) -> Iterator[None]:
    usual = allow_calls_in_flight(4)
    rpc.rpc_sync("worker1", allow_calls_in_flight, args=(4,))
    yield
    allow_calls_in_flight(usual)
    rpc.rpc_sync("worker1", allow_calls_in_flight, args=(usual,))


def count_threads() -> int:
    return threading.active_count()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def raise_unspeakable() -> None:
    raise Unspeakable


def test_a_coroutine_that_exits_is_answered_and_others_go_on() -> None:
    with pytest.raises(rpc.RemoteError, match="SystemExit"):
        rpc.rpc_sync("worker1", leave, timeout=20)
    assert rpc.rpc_sync("worker1", say, args=("well",), timeout=20) == "well"


def test_coroutines_that_block_do_not_pile_up_threads(workers: dict[str, Process]) -> None:
    rpc.rpc_sync("worker1", call_and_block, args=("main",))
    before = rpc.rpc_sync("worker1", count_threads)
    for _ in range(50):
        rpc.rpc_sync("worker1", call_and_block, args=("main",))
    assert rpc.rpc_sync("worker1", count_threads) < before + 20


def test_an_error_that_cannot_be_told_is_answered_all_the_same() -> None:
    with pytest.raises(rpc.RemoteError, match="Unspeakable"):
        rpc.rpc_sync("worker1", raise_unspeakable, timeout=20)


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), True])
def test_a_timeout_that_is_no_time_is_refused_and_leaves_no_reference(timeout: float) -> None:
    shared = rpc.debug_info()["references"]["shared"]
    reference = rpc.RRef(1)
    with pytest.raises(ValueError, match="is no time"):
        rpc.rpc_sync("worker1", functions.echo, args=(reference,), timeout=timeout)
    assert rpc.debug_info()["references"]["shared"] == shared


@pytest.mark.usefixtures("few_calls_in_flight")
@pytest.mark.parametrize("function", [await_back_and_forth, call_back_and_forth])
def test_coroutines_and_callbacks_that_call_on_do_not_wait_for_room(function: object) -> None:
    futures = [rpc.rpc_async("worker1", function, args=(4,), timeout=30) for _ in range(40)]
    assert [future.wait() for future in futures] == [4] * 40


def test_coroutines_that_block_may_recurse_between_two_workers() -> None:
    assert rpc.rpc_sync("worker1", block_back_and_forth, args=(60,), timeout=60) == 60


def test_a_coroutine_that_has_not_begun_is_not_held_up_by_one_that_blocks() -> None:
    coroutines = Coroutines()
    begun, queued, answered = (threading.Event() for _ in range(3))
    outcomes: list[object] = []
    done = threading.Event()

    async def block() -> bool:
        begun.set()
        queued.wait(20)
        coroutines.blocking()
        return answered.wait(20)

    async def answer() -> None:
        answered.set()

    def finish(value: object, error: BaseException | None) -> None:
        outcomes.append(value)
        done.set()

    coroutines.start(block())(finish)
    begun.wait(20)
    coroutines.start(answer())(lambda value, error: None)
    queued.set()
    done.wait(40)
    coroutines.close()
    assert outcomes == [True]


def test_coroutines_that_are_under_way_at_the_end_are_cancelled_and_their_loop_is_closed() -> None:
    coroutines = Coroutines()
    begun, ended = threading.Event(), threading.Event()
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    descriptors = len(os.listdir("/proc/self/fd"))

    async def wait_for_ever() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        begun.set()
        await asyncio.Event().wait()

    coroutines.start(wait_for_ever())(lambda value, error: ended.set())
    begun.wait(20)
    threads = [t for t in threading.enumerate() if t.name == "telegrad-coroutines"]
    coroutines.close()
    assert ended.wait(20)
    threads[-1].join(20)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    loop = loops[0]()
    assert loop is None or loop.is_closed()


async def grad_modes() -> list[bool]:
    modes = [torch.is_grad_enabled()]
    with torch.no_grad():
        await asyncio.sleep(0.05)
        modes.append(torch.is_grad_enabled())
        await asyncio.sleep(0.05)
    modes.append(torch.is_grad_enabled())
    with torch.enable_grad():
        await asyncio.sleep(0.05)
        modes.append(torch.is_grad_enabled())
    return modes


async def grad_mode() -> bool:
    return torch.is_grad_enabled()


def test_each_coroutine_has_the_grad_mode_of_its_caller_for_itself() -> None:
    with autograd.context():
        futures = [rpc.rpc_async("worker1", grad_modes)]
        with torch.no_grad():
            futures.append(rpc.rpc_async("worker1", grad_modes))
            assert not rpc.rpc_sync("worker1", grad_mode)
        futures.append(rpc.rpc_async("worker1", grad_modes))
        with_grad = [True, False, True, True]
        without = [False, False, False, True]
        assert [future.wait() for future in futures] == [with_grad, without, with_grad]
        assert rpc.rpc_sync("worker1", grad_mode)


async def raise_through_no_grad() -> None:
    with torch.no_grad():
        await asyncio.sleep(0)
        raise ArithmeticError("told to fail")


def test_errors_and_cancellation_pass_through_a_coroutine_s_own_mode() -> None:
    with pytest.raises(ArithmeticError, match="told to fail"):
        rpc.rpc_sync("worker1", raise_through_no_grad)
    with pytest.raises(TimeoutError):
        rpc.rpc_sync("worker1", wait_too_long)


async def wait_too_long() -> None:
    async with asyncio.timeout(0.05):
        await asyncio.sleep(60)
