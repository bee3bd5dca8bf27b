"""The thread that reads for all others has a deadline and handlers of its own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc import calls
from telegrad.rpc.calls import kind_of, latched
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import CallTimeout
from telegrad.rpc.outgoing import Outgoing
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import call, when_settled
from tests.rpc.test_interrupts import Late, be_late

MakeJob = Callable[..., Job]


def outgoing_to(to: str) -> Outgoing:
    rpc.rpc_sync(to, functions.nothing)
    agent: Any = current_node().transport
    found: Outgoing = agent._outgoing[rpc.get_worker_info(to).id]
    return found


# What a wait is for.


class Takes:
    """Time, or next to none."""

    def long(self) -> None:
        time.sleep(0.015)

    def little(self) -> None:
        pass


def expected_by_kind(to: str) -> dict[str, float]:
    """How long waits for methods are expected to take, after some, and replies read for others."""
    outgoing = outgoing_to(to)
    takes = rpc.remote(to, Takes)
    for _ in range(20):
        takes.rpc_sync().long()
        takes.rpc_sync().little()
    later = [rpc.rpc_async(to, time.sleep, args=(seconds,)) for seconds in (0.0, 0.2)]
    time.sleep(0.4)  # Nobody waits for them meanwhile.
    assert all(each.done() for each in later)
    stream: Any = outgoing.link.stream
    return {name: stream._lookout._expected[hash(name)] for name in ("long", "little")}


def test_waits_for_different_methods_are_told_apart(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    expected = job["a"].do(expected_by_kind, "b")
    assert expected["little"] < 0.01 < expected["long"]


def test_what_is_described_in_words_is_the_same_kind_each_time() -> None:
    first, second = (f"a RemoteSequential of {count} modules" for count in (2, 2))
    assert first is not second
    assert kind_of(first) == kind_of(second) != kind_of("a RemoteSequential of 3 modules")


def expected_after(caller: str) -> dict[str, float]:
    """How long it is expected to take until that worker calls again, by what it called last."""
    agent: Any = current_node().transport
    worker = rpc.get_worker_info(caller).id
    expected = agent._incoming[worker].link.stream._lookout._expected
    return {
        function.__name__: expected[kind_of(function) ^ worker]
        for function in (functions.nothing, functions.nothing_with)
    }


def call_with_pauses(to: str) -> dict[str, float]:
    for _ in range(20):
        rpc.rpc_sync(to, functions.nothing_with, args=(1,))
        rpc.rpc_sync(to, functions.nothing)
        time.sleep(0.015)
    found: dict[str, float] = rpc.rpc_sync(to, expected_after, args=("a",))
    return found


def test_waits_after_different_requests_are_told_apart(make_job: MakeJob) -> None:
    expected = make_job("a", "b")["a"].do(call_with_pauses, "b")
    assert expected["nothing_with"] < 0.01 < expected["nothing"]


# Replies for others that come without a pause.


def read_for_others(to: str, raises: type[Exception], timeout: float) -> bool:
    """Wait for what never comes, as the reader of others that call all the time."""
    outgoing, me, over = outgoing_to(to), threading.get_ident(), threading.Event()

    def call_on() -> None:
        while outgoing._reader != me and not over.is_set():
            time.sleep(0.001)
        while not over.is_set():
            rpc.rpc_sync(to, functions.nothing)
            if next(made) == 30 and raises is Late:
                signal.pthread_kill(me, signal.SIGALRM)

    made = itertools.count()
    before = signal.signal(signal.SIGALRM, be_late)
    others = [threading.Thread(target=call_on) for _ in range(3)]
    for other in others:
        other.start()
    try:
        with pytest.raises(raises):
            rpc.rpc_sync(to, functions.wait_event, args=("never",), timeout=timeout)
    finally:
        over.set()
        for other in others:
            other.join()
        signal.signal(signal.SIGALRM, before)
    return True


def test_a_reader_keeps_its_deadline_while_replies_come_for_others(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(read_for_others, "b", CallTimeout, 0.2)


def test_a_reader_is_interrupted_while_replies_come_for_others(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(read_for_others, "b", Late, 0)


# Waits that are interrupted.


def interrupted_wait(to: str) -> str:
    """Wait for a call until SIGINT comes; then call again."""
    try:
        rpc.rpc_sync(to, functions.announce_and_wait, args=("interrupt me", "never"), timeout=0)
    except KeyboardInterrupt:
        return str(rpc.rpc_sync(to, functions.who_am_i))
    raise AssertionError("not interrupted")


def test_a_wait_is_interrupted_by_ctrl_c_and_calls_go_on(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    waiting = job["a"].begin(interrupted_wait, "b")
    job["c"].do(call, "b", functions.wait_event, "interrupt me")
    job["a"].signal(signal.SIGINT)
    assert waiting.result(30) == "b"


def interrupted_behind_a_reader(to: str) -> list[Any]:
    """The main thread waits while another one reads, and is interrupted."""
    outgoing, me = outgoing_to(to), threading.get_ident()

    def interrupt_who_waits() -> None:
        while not outgoing._waiters:
            time.sleep(0.001)
        signal.pthread_kill(me, signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(rpc.rpc_sync, to, functions.wait_event, args=("reader",))
        while not outgoing._reader:
            time.sleep(0.001)
        pool.submit(interrupt_who_waits)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync(to, functions.wait_event, args=("never",), timeout=0)
        rpc.rpc_async(to, functions.set_event, args=("reader",)).wait()
        return [reader.result(20), rpc.rpc_sync(to, functions.who_am_i, timeout=30)]


def test_an_interrupted_wait_does_not_keep_others_from_their_replies(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(interrupted_behind_a_reader, "b") == ["reader", "b"]


# Handlers that call.


def handle_by_a_call(to: str, beforehand: Callable[[], object] = lambda: None) -> str:
    """Wait for what only the handler of a signal, by a call, makes come."""

    def let_it_come(number: int, frame: object) -> None:
        beforehand()
        rpc.rpc_sync(to, functions.set_event, args=("handled",), timeout=20)

    before = signal.signal(signal.SIGALRM, let_it_come)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        came: str = rpc.rpc_sync(to, functions.wait_event, args=("handled",), timeout=40)
        return came
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_calls_while_its_thread_reads(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(handle_by_a_call, "b") == "handled"
    assert job["a"].do(handle_by_a_call, "a") == "handled"


def handle_on_the_queue(to: str) -> str:
    """The reader leaves while the handler runs: the reading must not be left to what waits below
    the handler."""
    outgoing = outgoing_to(to)
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(rpc.rpc_sync, to, functions.wait_event, args=("reader leaves",))
        while not outgoing._reader:
            time.sleep(0.001)

        def let_the_reader_leave() -> None:
            pool.submit(rpc.rpc_sync, to, functions.set_event, ("reader leaves",)).result(20)
            reader.result(20)

        return handle_by_a_call(to, let_the_reader_leave)


def test_a_handler_calls_while_its_thread_waits_for_its_turn(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(handle_on_the_queue, "b") == "handled"


# Calls to oneself, which nobody reads.


def wait_together() -> bool:
    """Two threads begin to wait for one call at the same moment. Whether both were woken."""
    both, latches = threading.Barrier(2), threading.Semaphore(0)

    def made_slowly() -> threading.Lock:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        latches.release()
        return latched()

    def wait() -> bool:
        until = time.monotonic() + 10
        node.transport.wait(pending, until)
        return time.monotonic() < until

    node = current_node()
    pending = node.call(node.info, functions.wait_event, ("both wait",), None)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(calls, "latched", made_slowly)
        waiting = [pool.submit(wait), pool.submit(wait)]
        latches.acquire()
        functions.set_event("both wait")
        return all(each.result() for each in waiting)


def test_two_threads_that_wait_for_a_call_to_oneself_are_both_woken(make_job: MakeJob) -> None:
    job = make_job("a")
    assert job["a"].do(wait_together)


# What was served.


def keep_nothing(rref: Any) -> None:
    pass


def let_go_after_a_call(to: str) -> bool:
    """Whether a value goes that a function brought along, although nothing else is called."""
    node = current_node()
    before = len(node.values._stored)
    rref: Any = rpc.RRef([1])
    rpc.rpc_sync(to, functools.partial(keep_nothing, rref))
    assert len(node.values._stored) == before + 1
    del rref
    return when_settled(lambda: len(node.values._stored) == before, 5)


def test_a_worker_does_not_keep_what_it_was_called_with(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(let_go_after_a_call, "b")
