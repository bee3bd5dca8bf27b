"""Calls that answer later: futures, coroutines, functions that return futures."""

from __future__ import annotations

import asyncio
import gc
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import current_node
from telegrad.rpc.outgoing import Outgoing
from tests.rpc import functions
from tests.rpc.functions import Account

pytestmark = pytest.mark.usefixtures("workers")


def test_a_call_gives_a_torch_future() -> None:
    future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
    assert isinstance(future, torch.futures.Future)
    assert future.wait().tolist() == [2, 2]
    assert future.done()
    assert future.value().tolist() == [2, 2]
    assert future.wait().tolist() == [2, 2]


def test_futures_chain_and_tell_callbacks() -> None:
    told = threading.Event()
    future = rpc.rpc_async("worker1", functions.echo, args=(2,))
    future.add_done_callback(lambda f: told.set())
    assert future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 2).wait() == 6
    assert told.wait(30)


def test_a_chained_function_may_call() -> None:
    def go_on(future: torch.futures.Future[int]) -> str:
        return str(rpc.rpc_sync("worker2", functions.who_am_i)) + str(future.wait())

    futures = [rpc.rpc_async("worker1", functions.echo, args=(n,)).then(go_on) for n in range(50)]
    assert [future.wait() for future in futures] == [f"worker2{n}" for n in range(50)]


@pytest.mark.parametrize("to", ["main", "worker1"])
def test_what_arrives_in_inference_mode_is_an_ordinary_tensor(to: str) -> None:
    rref = rpc.remote(to, torch.ones, args=(2,))
    with torch.inference_mode():
        future = rpc.rpc_async(to, torch.ones, args=(2,))
        arrived = {
            "rpc_sync": rpc.rpc_sync(to, torch.ones, args=(2,)),
            "rpc_async": future.wait(),
            "a container": rpc.rpc_sync(to, functions.echo, args=([torch.ones(2)],))[0],
            "a parameter": rpc.rpc_sync(to, torch.nn.Linear, args=(1, 1)).weight,
            "to_here": rref.to_here(),
            "a method": rref.rpc_sync().add(1),
        }
    for what, tensor in arrived.items():
        assert not tensor.is_inference(), what
        (tensor * torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_callbacks_do_not_run_in_the_modes_of_who_waits(mode: Callable[[], Any]) -> None:
    modes: queue.SimpleQueue[tuple[bool, bool]] = queue.SimpleQueue()
    name = f"waits in {mode}"
    future = rpc.rpc_async("worker1", functions.wait_event, args=(name,))
    future.add_done_callback(
        lambda _: modes.put((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    )
    with mode():
        rpc.rpc_async("worker1", functions.set_event, args=(name,))
        future.wait()
        assert not torch.is_grad_enabled()
    assert modes.get(timeout=10) == (False, True)


def test_many_futures_are_awaited_together() -> None:
    futures = [rpc.rpc_async(1 + n % 2, functions.echo, args=(n,)) for n in range(100)]
    assert torch.futures.wait_all(futures) == list(range(100))
    futures = [rpc.rpc_async(n % 3, functions.echo, args=(n,)) for n in range(100)]
    collected = torch.futures.collect_all(futures).wait()
    assert [future.wait() for future in collected] == list(range(100))


def test_an_error_comes_out_of_wait_then_and_wait_all() -> None:
    def failing() -> rpc.CallFuture:
        return rpc.rpc_async("worker1", functions.raise_value_error, args=("f",))

    with pytest.raises(ValueError, match="f"):
        failing().wait()
    with pytest.raises(Exception, match="f"):
        failing().then(lambda f: f.wait()).wait()
    with pytest.raises(Exception, match="f"):
        torch.futures.wait_all([failing(), failing()])


def test_futures_are_awaited_in_a_coroutine() -> None:
    async def go() -> list[int]:
        futures = [rpc.rpc_async("worker1", functions.echo, args=(n,)) for n in range(20)]
        return [await future for future in futures]

    assert asyncio.run(go()) == list(range(20))


def test_an_awaited_error_is_raised() -> None:
    async def go() -> None:
        await rpc.rpc_async("worker1", functions.raise_value_error, args=("awaited",))

    with pytest.raises(ValueError, match="awaited"):
        asyncio.run(go())


def test_gather_works_on_futures() -> None:
    async def ask(n: int) -> int:
        return int(await rpc.rpc_async(1 + n % 2, functions.echo, args=(n,)))

    async def go() -> list[int]:
        return await asyncio.gather(*(ask(n) for n in range(50)))

    assert asyncio.run(go()) == list(range(50))


def test_a_future_that_nobody_waits_for_still_completes() -> None:
    done = threading.Event()
    rpc.rpc_async("worker1", functions.nothing).add_done_callback(lambda f: done.set())
    assert done.wait(30)


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [(functions.raise_value_error, ("x",), "x"), (functions.give_unreadable, (), "cannot be read")],
    ids=["raised there", "raised here"],
)
def test_an_error_keeps_neither_its_future_nor_the_frames_that_it_passed(
    function: Callable[..., None], args: tuple[str, ...], words: str
) -> None:
    """A future lives outside of Python: no collector finds a ring that goes through it."""

    class Marker:
        """Lives as long as the frame that has it."""

    def ask_and_fail() -> list[weakref.ref[object]]:
        marker = Marker()
        future = rpc.rpc_async("worker1", function, args=args)
        for wait in (future.wait, future.value, future.then(lambda f: f.wait()).wait):
            with pytest.raises(Exception, match=words):
                wait()
        return [weakref.ref(marker), weakref.ref(future)]

    gone = ask_and_fail()
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_an_error_is_the_same_at_every_wait() -> None:
    future = rpc.rpc_async("worker1", functions.raise_named, args=("needs two",))
    errors = []
    for _ in range(3):
        with pytest.raises(Exception, match="7 at gate") as caught:
            future.wait()
        errors.append(caught.value)
    assert len({str(error) for error in errors}) == 1
    assert all("on worker 'worker1'" in str(error.__cause__) for error in errors)


# Several that wait.


def test_of_two_that_wait_for_one_future_both_are_served_when_one_became_the_reader() -> None:
    shared = rpc.rpc_async("worker1", functions.wait_event, args=("served twice",), timeout=30)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(rpc.rpc_sync, "worker1", functions.wait_event, args=("read by",))
        agent: Any = current_node().transport
        await_that(lambda: agent._outgoing[1]._reader)
        both = [pool.submit(shared.wait) for _ in range(2)]
        await_that(lambda: threads_on_the_queue() == 2)
        rpc.rpc_sync("worker1", functions.set_event, args=("read by",))
        first.result(30)
        # One of the two reads now, and has left the queue.
        await_that(lambda: threads_on_the_queue() == 1)
        rpc.rpc_sync("worker1", functions.set_event, args=("served twice",))
        assert [each.result(30) for each in both] == ["served twice"] * 2


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads_on_the_queue() -> int:
    """How many wait for others to serve them."""
    turn = Outgoing._await_turn.__code__
    return sum(frame.f_code is turn for frame in sys._current_frames().values())


# Coroutines.


def test_async_functions_run_as_coroutines() -> None:
    for to in ("worker1", "main"):
        assert rpc.rpc_sync(to, functions.add_as_coroutine, args=(1, 2)) == 3
        assert rpc.remote(to, functions.add_as_coroutine, args=(1, 2)).to_here() == 3
    got = rpc.rpc_sync("worker1", functions.call_from_coroutine, args=("worker2", torch.ones(1)))
    assert got.tolist() == [3]
    with pytest.raises(LookupError, match="in a coroutine"):
        rpc.rpc_sync("worker1", functions.fail_in_coroutine)


def test_coroutines_that_wait_are_in_nobodys_way() -> None:
    waiting = [
        rpc.rpc_async("worker1", functions.wait_in_coroutine, args=(f"c{n}", "coroutines"))
        for n in range(50)
    ]
    rpc.rpc_sync("worker1", functions.wait_event, args=("c49",))
    assert rpc.rpc_sync("worker1", functions.add_as_coroutine, args=(1, 1)) == 2
    rpc.rpc_sync("worker1", functions.set_event, args=("coroutines",))
    assert torch.futures.wait_all(waiting) == ["coroutines"] * 50


def test_a_coroutine_that_blocks_in_a_call_does_not_stop_the_others() -> None:
    waiting = rpc.rpc_async("worker1", functions.block_in_coroutine, args=("worker1",))
    assert waiting.wait() == "worker1"
    ring = [
        rpc.rpc_async("worker1", functions.block_in_coroutine, args=("worker2",)) for _ in range(20)
    ]
    assert torch.futures.wait_all(ring) == ["worker2"] * 20


# Functions that return futures.


def test_async_execution_answers_with_the_value_of_the_future() -> None:
    one = torch.ones(1)
    for to in ("worker1", "main"):
        got = rpc.rpc_sync(to, functions.add_on_another, args=("worker2", one, 1))
        assert got.tolist() == [3]
        got = rpc.remote(to, functions.add_on_another, args=("worker2", one, 1)).to_here()
        assert got.tolist() == [3]


def test_async_execution_works_on_static_class_and_bound_methods() -> None:
    assert rpc.rpc_sync("worker1", Account.double_later, args=("worker2", 2.0)) == 4.0
    assert rpc.rpc_sync("worker1", Account.double_class_later, args=("worker2", 2.0)) == 4.0
    assert rpc.rpc_sync("worker1", Account(1.0).add_later, args=(2.0,)) == 3.0


def test_async_execution_and_coroutines_work_through_references() -> None:
    account = rpc.remote("worker1", Account, args=(1.0,))
    assert account.rpc_sync().add_later(1.0) == 2.0
    assert account.rpc_async().add_later(1.0).wait() == 3.0
    assert account.remote().add_later(1.0).to_here() == 4.0
    assert account.rpc_sync().add_soon(1.0) == 5.0
    assert account.rpc_async().add_soon(1.0).wait() == 6.0
    assert account.remote().add_soon(1.0).to_here() == 7.0
    assert account.rpc_sync().double_later("worker2", 4.0) == 8.0


def test_errors_of_such_functions_arrive() -> None:
    with pytest.raises(Exception, match="from afar"):
        rpc.rpc_sync("worker1", functions.future_that_fails, args=("worker2",))
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("worker1", functions.no_future)


def test_chains_of_futures_over_many_workers_hold_no_thread() -> None:
    path = ["worker1", "worker2"] * 100
    assert rpc.rpc_sync("worker2", functions.chain, args=(path,)) == 200


def test_an_answer_that_comes_after_the_loop_that_awaited_it_has_ended_says_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    future = rpc.rpc_async("worker1", functions.wait_event, args=("loop ended",))

    async def give_up() -> None:
        await asyncio.wait_for(asyncio.ensure_future(_awaited(future)), 0.01)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(give_up())
    rpc.rpc_sync("worker1", functions.set_event, args=("loop ended",))
    assert future.wait() == "loop ended"
    assert "Event loop is closed" not in capfd.readouterr().err


async def _awaited(future: rpc.CallFuture) -> object:
    return await future
