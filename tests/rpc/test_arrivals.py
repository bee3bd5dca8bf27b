"""Replies of several workers, of which one thread waits for one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.errors import CallTimeout
from telegrad.rpc.outgoing import Outgoing
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent, call, when_settled
from tests.rpc.test_interrupts import interrupt_often

MakeJob = Callable[..., Job]
SEED = 20261118
TCP: dict[str, Any] = {"host": "127.0.0.1", "transports": ("tcp",)}
TRANSPORTS = [pytest.param({}, id="unix"), pytest.param(TCP, id="tcp")]


def outgoing_to(to: str) -> Outgoing:
    found = agent()._outgoing[rpc.get_worker_info(to).id]
    assert isinstance(found, Outgoing)
    return found


def wait_for(*names: str) -> list[torch.futures.Future[Any]]:
    """Calls to b, c and so on, each of which ends when an event of its own name is set there."""
    for name in names:
        rpc.rpc_sync(name, functions.nothing)
    return [rpc.rpc_async(name, functions.wait_event, args=(name,), timeout=40) for name in names]


def release(name: str) -> None:
    """Let a call end, without a message by its link: d does so."""
    rpc.rpc_sync("d", call, args=(name, functions.set_event, name), timeout=30)


def when_gathering(name: str, thread: int) -> None:
    """Return when that thread waits for that worker, and for all others."""
    outgoing = outgoing_to(name)
    assert when_settled(lambda: outgoing._reader == thread and agent().arrivals._gathering.locked())


@contextmanager
def meanwhile(work: Callable[[int], object]) -> Iterator[None]:
    """Do that on another thread; what it raises is raised here."""
    me = threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, me)
        yield
        done.result(40)


# Who reads.


def readers_of_another() -> list[bool]:
    """Whether those that read a reply of c were the thread that waits for b."""
    by_main: list[bool] = []
    me = threading.get_ident()
    first, second = wait_for("b", "c")
    outgoing = outgoing_to("c")
    take = outgoing._take_one

    def note_and_take(*args: Any, **options: Any) -> Any:
        frame = take(*args, **options)
        if frame is not None:
            by_main.append(threading.get_ident() == me)
        return frame

    outgoing._take_one = note_and_take  # type: ignore[method-assign]

    def let_both_come(main: int) -> None:
        when_gathering("b", main)
        release("c")
        assert when_settled(lambda: bool(by_main))
        release("b")

    with meanwhile(let_both_come):
        assert first.wait() == "b"
    assert second.wait() == "c"
    return by_main


def test_who_waits_for_one_worker_reads_the_replies_of_others(make_job: MakeJob) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(readers_of_another) == [True]


def lent_threads(rounds: int) -> int:
    """How many threads were lent to read replies that the one who waits could have read."""
    lent: list[object] = []
    others = ("b", "c", "d")
    for name in others:
        rpc.rpc_sync(name, functions.nothing)
    read = agent().arrivals._read_for_others
    agent().arrivals._read_for_others = lambda: (lent.append(None), read())  # type: ignore
    for _ in range(rounds):
        futures = [rpc.rpc_async(name, functions.sleep_for, args=(0.02,)) for name in others]
        assert [future.wait() for future in futures] == [0.02] * 3
    return len(lent)


def test_nobody_else_is_woken_for_replies_that_come_while_one_waits(make_job: MakeJob) -> None:
    rounds = 20
    assert make_job("a", "b", "c", "d")["a"].do(lent_threads, rounds) < 2 * rounds


# When futures are completed.


def complete_while_waiting(callback: bool) -> bool:
    """b's call ends only after the future of c is completed."""
    first, second = wait_for("b", "c")
    completed = threading.Event()
    threads: list[int] = []
    if callback:

        def done(_: object) -> None:
            threads.append(threading.get_ident())
            # It would wait for ever for a thread that waits for b.
            release("b")
            completed.set()

        second.add_done_callback(done)

    def let_c_come(main: int) -> None:
        when_gathering("b", main)
        release("c")
        if callback:
            assert completed.wait(30)
        else:
            assert when_settled(second.done)
            release("b")

    with meanwhile(let_c_come):
        assert first.wait() == "b"
    return threading.get_ident() not in threads


@pytest.mark.parametrize("callback", [True, False])
def test_a_future_is_completed_while_the_one_that_read_its_reply_waits_on(
    make_job: MakeJob, callback: bool
) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(complete_while_waiting, callback)


def callback_that_comes_late() -> list[Any]:
    """A callback is set on a future whose reply has been read and that is not completed yet."""
    first, second = wait_for("b", "c")
    pending: Any = second._pending  # type: ignore[attr-defined]
    seen: list[Any] = []

    def let_c_come(main: int) -> None:
        when_gathering("b", main)
        release("c")
        assert when_settled(lambda: pending.done)
        second.then(lambda future: seen.append(future.value()))
        assert when_settled(lambda: bool(seen))
        release("b")

    with meanwhile(let_c_come):
        first.wait()
    return seen


def test_a_callback_that_is_set_on_a_reply_that_was_read_is_called(make_job: MakeJob) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(callback_that_comes_late) == ["c"]


def wait_for_all_by_torch() -> list[str]:
    """Nobody waits in the transport: the watch has all of them read."""
    futures = wait_for("b", "c")
    with meanwhile(lambda _: [release("c"), release("b")]):
        return list(torch.futures.wait_all(futures))


def test_futures_that_torch_waits_for_are_read(make_job: MakeJob) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(wait_for_all_by_torch) == ["b", "c"]


# What else may happen to a thread that waits for all.


def expire_while_gathering() -> str:
    first, second = wait_for("b", "c")
    late = rpc.rpc_async("b", functions.wait_event, args=("never",), timeout=0.3)
    with pytest.raises(CallTimeout):
        late.wait()
    with meanwhile(lambda _: [release("c"), release("b")]):
        assert first.wait() == "b"
        return str(second.wait())


def test_a_deadline_is_kept_while_others_are_waited_for(make_job: MakeJob) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(expire_while_gathering) == "c"


def interrupt_while_gathering() -> list[Any]:
    first, second = wait_for("b", "c")

    def interrupt(main: int) -> None:
        when_gathering("b", main)
        signal.pthread_kill(main, signal.SIGINT)

    with meanwhile(interrupt), pytest.raises(KeyboardInterrupt):
        first.wait()
    with meanwhile(lambda _: [release("c"), release("b")]):
        return [first.wait(), second.wait(), agent().arrivals._gathering.locked()]


def test_an_interrupt_ends_the_wait_for_all_and_loses_nothing(make_job: MakeJob) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(interrupt_while_gathering) == ["b", "c", False]


def end_by(function: Callable[[], object], awaited: str, ended: str) -> list[str]:
    """Wait for one worker, while that one or another one ends; then for the other."""
    futures = dict(zip(("b", "c"), wait_for("b", "c"), strict=True))
    (other,) = {"b", "c"} - {ended}

    def have_it_end(main: int) -> None:
        when_gathering(awaited, main)
        rpc.rpc_async("d", call, args=(ended, function))
        assert when_settled(lambda: bool(rpc.debug_info()["lost workers"]))
        release(other)

    outcomes = {}
    with meanwhile(have_it_end):
        for name in (awaited, *(set(futures) - {awaited})):
            try:
                outcomes[name] = futures[name].wait()
            except rpc.WorkerLost as error:
                outcomes[name] = str(error)
    return [outcomes[other], outcomes[ended]]


def die() -> None:
    os._exit(1)


@pytest.mark.parametrize("ended", ["b", "c"])
def test_a_worker_that_dies_while_all_are_waited_for_is_noticed(
    make_job: MakeJob, ended: str
) -> None:
    other, lost = make_job("a", "b", "c", "d")["a"].do(end_by, die, "b", ended)
    assert other == ({"b", "c"} - {ended}).pop()
    assert f"worker {ended!r}" in lost


def say_goodbye() -> None:
    threading.Thread(target=lambda: rpc.shutdown(graceful=False)).start()


@pytest.mark.parametrize("ended", ["b", "c"])
def test_a_worker_that_leaves_while_all_are_waited_for_is_said_to_have_left(
    make_job: MakeJob, ended: str
) -> None:
    other, lost = make_job("a", "b", "c", "d")["a"].do(end_by, say_goodbye, "b", ended)
    assert other == ({"b", "c"} - {ended}).pop()
    assert "has left the job" in lost


def break_while_gathering(broken: str) -> list[str]:
    first, second = wait_for("b", "c")

    def break_it(main: int) -> None:
        when_gathering("b", main)
        stream = outgoing_to(broken).link.stream
        agent().sever(rpc.get_worker_info(broken).id)
        assert when_settled(lambda: outgoing_to(broken).link.stream is not stream)
        release("c")
        release("b")

    with meanwhile(break_it):
        return [first.wait(), second.wait()]


@pytest.mark.parametrize("broken", ["b", "c"])
def test_a_connection_that_breaks_while_all_are_waited_for_is_mended(
    make_job: MakeJob, broken: str
) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(break_while_gathering, broken) == ["b", "c"]


# Many at once.


def _note(called_back: list[Any], done: torch.futures.Future[Any]) -> None:
    called_back.append(done.value())


def shuffle_calls(seed: int, rounds: int) -> int:
    """One thread of several: calls of all kinds to all workers, waited for in any order."""
    draw = random.Random(seed)
    made = 0
    for number in range(rounds):
        expected: list[Any] = []
        begun: list[Callable[[], Any]] = []
        called_back: list[Any] = []
        callbacks = 0
        for _ in range(draw.randint(1, 6)):
            name = draw.choice(("b", "c", "d"))
            value = draw.choice((number, "x" * 70_000, torch.full((3,), float(number))))
            expected.append(value)
            if draw.random() < 0.2:
                result = rpc.rpc_sync(name, functions.echo, args=(value,), timeout=60)
                begun.append(lambda result=result: result)
                continue
            future = rpc.rpc_async(name, functions.echo, args=(value,), timeout=60)
            if draw.random() < 0.3:
                callbacks += 1
                future.add_done_callback(partial(_note, called_back))
            begun.append(future.wait)
        order = list(range(len(begun)))
        draw.shuffle(order)
        for at in order:
            found = begun[at]()
            wanted = expected[at]
            same = torch.equal(found, wanted) if torch.is_tensor(wanted) else found == wanted
            assert same
            made += 1
        assert when_settled(lambda: len(called_back) == callbacks)  # noqa: B023
    return made


def shuffle_calls_on_threads(threads: int, rounds: int, seed: int = SEED) -> bool:
    with ThreadPoolExecutor(threads) as pool:
        made = [pool.submit(shuffle_calls, seed + each, rounds) for each in range(threads)]
        assert all(each.result(120) for each in made)
    assert not agent().arrivals._gathering.locked()
    return not any(rpc.debug_info()["calls in flight"])


@pytest.mark.parametrize("options", TRANSPORTS)
def test_threads_that_wait_for_several_workers_at_once_get_what_they_called_for(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    assert make_job("a", "b", "c", "d", **options)["a"].do(shuffle_calls_on_threads, 4, 60)


def interrupt_fan(times: int, seed: int = SEED) -> int:
    def call_all() -> None:
        names = ("b", "c", "d")
        futures = [rpc.rpc_async(name, functions.echo, args=(name,), timeout=20) for name in names]
        assert [future.wait() for future in futures] == list(names)

    call_all()
    caught = interrupt_often(call_all, times, seed, 0.004)
    started = time.monotonic()
    call_all()
    assert time.monotonic() - started < 20
    assert when_settled(lambda: not rpc.debug_info()["calls in flight"])
    return caught


def test_calls_to_many_that_are_interrupted_leave_all_links_as_they_were(
    make_job: MakeJob,
) -> None:
    assert make_job("a", "b", "c", "d")["a"].do(interrupt_fan, 300) > 20


def until(moment: float) -> float:
    while time.time() < moment:
        pass
    return moment


def callbacks_that_wait_for_each_other(rounds: int) -> int:
    """In how many rounds a callback that torch made waited in vain for the other reply."""
    in_vain = 0
    for _ in range(rounds):
        done = threading.Event()

        def one(done: threading.Event = done) -> None:
            moment = time.time() + 0.03
            first, second = (rpc.rpc_async(to, until, args=(moment,)) for to in ("b", "c"))
            both = torch.futures.collect_all([first])
            both.then(lambda _: torch.futures.collect_all([second]).wait()).wait()
            done.set()

        threading.Thread(target=one, daemon=True).start()
        in_vain += not done.wait(20)
    return in_vain


def test_callbacks_of_replies_that_come_together_may_wait_for_each_other(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", "c")
    assert job["a"].do(callbacks_that_wait_for_each_other, 8) == 0
