"""A signal handler that raises at any moment: the call it hits is given up, and nothing else."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc.current import current_node
from telegrad.wire import interrupts
from tests.rpc import functions
from tests.rpc.fleet import Job, Process

SEED = 20261116
LONGEST = 0.002

MakeJob = Callable[..., Job]


class Late(TimeoutError):
    """What many a program raises when its alarm goes off. It is an OSError, as those of sockets."""


def be_late(number: int, frame: object) -> None:
    raise Late


@contextmanager
def alarm_in(seconds: float) -> Iterator[None]:
    """Have an alarm that raises, and hear nothing of it afterwards."""
    before = signal.signal(signal.SIGALRM, be_late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt_often(work: Callable[[], object], times: int, seed: int, longest: float) -> int:
    """Do it again and again, each time with an alarm after a random time. How many raised."""
    draw = random.Random(seed)
    caught = 0
    for _ in range(times):
        try:
            with alarm_in(draw.uniform(1e-5, longest)):
                work()
        except Late:
            caught += 1
    return caught


def duration(work: Callable[[], object]) -> float:
    """Seconds that it takes, as a rule."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


# Calls.

ran: list[int] = []


def note(number: int) -> int:
    ran.append(number)
    return number


def noted() -> list[int]:
    return ran


def interrupt_calls(to: str, times: int, seed: int = SEED) -> int:
    """Each call runs at most once, and each that returned has run; the link stays what it was."""
    numbers = itertools.count()
    returned: list[int] = []
    rpc.rpc_sync(to, note, args=(-1,))
    link = current_link(to)

    def call() -> None:
        number = next(numbers)
        assert rpc.rpc_sync(to, note, args=(number,), timeout=20) == number
        returned.append(number)

    # On a quick machine hardly a call would last until an alarm that is set for a slow one.
    caught = interrupt_often(call, times, seed, 3 * duration(call))
    all_that_ran = rpc.rpc_sync(to, noted, timeout=20)[1:]
    assert sorted(set(all_that_ran)) == sorted(all_that_ran)
    assert set(returned) <= set(all_that_ran)
    assert current_link(to) is link
    return caught


def current_link(to: str) -> object:
    agent: Any = current_node().transport
    outgoing = agent._outgoing[rpc.get_worker_info(to).id]
    return outgoing.link.stream


def test_an_interrupted_call_leaves_the_link_as_it_was(make_job: MakeJob) -> None:
    assert make_job("a", "b")["a"].do(interrupt_calls, "b", 400) > 20


def interrupt_all_ways(to: str, times: int, seed: int = SEED) -> int:
    """Small and large, waited for or not, with references among the results."""
    tensor, large = torch.arange(8.0), torch.ones(1 << 18)

    def call_in_all_ways() -> None:
        futures = [rpc.rpc_async(to, torch.add, args=(tensor, n)) for n in range(4)]
        reference = rpc.remote(to, torch.mul, args=(tensor, 2))
        assert rpc.rpc_sync(to, torch.sum, args=(large,), timeout=20) == 1 << 18
        assert torch.equal(reference.to_here(timeout=20), 2 * tensor)
        for number, future in enumerate(futures):
            assert torch.equal(future.wait(), tensor + number)

    caught = interrupt_often(call_in_all_ways, times, seed, 4 * LONGEST)
    call_in_all_ways()
    return caught


def held() -> tuple[int, ...]:
    """What a worker keeps for others, and what it waits for."""
    gc.collect()
    info = rpc.debug_info()
    return info["references"]["owned"], len(info["calls in flight"])


def settles(process: Process, work: Callable[[], object], wanted: object) -> bool:
    until = time.monotonic() + 40
    while process.do(work) != wanted and time.monotonic() < until:
        time.sleep(0.02)
    return bool(process.do(work) == wanted)


def test_whatever_way_of_calling_is_interrupted_nothing_is_kept(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(interrupt_all_ways, "b", 200) > 20
    assert settles(job["b"], held, (0, 0))
    assert settles(job["a"], held, (0, 0))


# Passes.


def interrupt_passes(to: str, times: int, seed: int = SEED) -> int:
    x = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(4, 2, requires_grad=True)

    def run_a_pass() -> None:
        with autograd.context() as context:
            product = rpc.rpc_sync(to, torch.matmul, args=(x, weight), timeout=20)
            loss = rpc.rpc_async(to, torch.sum, args=(product,), timeout=20).wait()
            autograd.backward(context, [loss])
            gradients = autograd.get_gradients(context)
        assert torch.allclose(gradients[x], weight.sum(1).expand(8, 4))
        assert torch.allclose(gradients[weight], x.sum(0)[:, None].expand(4, 2), atol=1e-5)

    run_a_pass()
    caught = interrupt_often(run_a_pass, times, seed, 3 * LONGEST)
    run_a_pass()
    return caught


def contexts() -> int:
    return len(current_node().services["autograd"].container)


def test_an_interrupted_pass_leaves_the_next_ones_right(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(interrupt_passes, "b", 200) > 20
    assert settles(job["b"], contexts, 0)


# Handlers.


def test_a_handler_is_the_programs_own_to_see(make_job: MakeJob) -> None:
    assert make_job("a")["a"].do(sees_its_own_handlers)


def sees_its_own_handlers() -> bool:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGUSR2, be_late)
    assert before is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is be_late
    assert signal.signal(signal.SIGUSR2, signal.SIG_DFL) is be_late
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    with pytest.raises((OSError, ValueError)):
        signal.signal(signal.SIGKILL, be_late)
    return True


def test_one_signal_is_handled_once(make_job: MakeJob) -> None:
    """What was put off is knocked about until it has run, and then no more."""
    assert make_job("a")["a"].do(handle_while_knocking) == 50


def handle_while_knocking() -> int:
    handled: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(50):
        interrupts.put_off[int(signal.SIGUSR2)] = None
        knocking = threading.Thread(target=interrupts._knock, args=(main,))
        knocking.start()
        interrupts.run_put_off()
        knocking.join()
    return len(handled)


def test_a_handler_that_is_replaced_while_it_is_put_off_is_run(make_job: MakeJob) -> None:
    assert make_job("a")["a"].do(replace_what_is_put_off)


def replace_what_is_put_off() -> bool:
    signal.signal(signal.SIGUSR2, be_late)
    interrupts.put_off[int(signal.SIGUSR2)] = None
    with pytest.raises(Late):
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    return not interrupts.put_off


def test_after_the_job_handlers_are_as_before(make_job: MakeJob) -> None:
    assert make_job("a")["a"].do(handlers_after_the_job)


def handlers_after_the_job() -> bool:
    signal.signal(signal.SIGUSR2, be_late)
    rpc.shutdown()
    import _signal  # type: ignore[import-not-found]

    return _signal.getsignal(signal.SIGUSR2) is be_late and _signal.signal is interrupts._set


def test_a_program_that_was_given_as_a_string_is_interrupted_at_once(make_job: MakeJob) -> None:
    assert make_job("a")["a"].do(shielded_when_called_from_telegrad) == [False, True]


def shielded_when_called_from_telegrad() -> list[bool]:
    """Of a function of a program by `-c`, and of a method that was made for a dataclass."""
    names: dict[str, Any] = {"found": [], "is_shielded": interrupts._is_shielded}
    exec(
        "import sys\n"
        "def program(*_): found.append(is_shielded(sys._getframe()))\n"
        "def __init__(*_): found.append(is_shielded(sys._getframe()))\n",
        names,
    )
    for handler in (names["program"], names["__init__"]):
        signal.signal(signal.SIGUSR2, handler)
        interrupts.put_off[int(signal.SIGUSR2)] = None
        interrupts.run_put_off()
    found: list[bool] = names["found"]
    return found


class Pair(NamedTuple):
    """As frames and messages are."""

    first: object
    second: object


def test_to_make_a_named_tuple_is_part_of_what_it_is_made_for() -> None:
    """An alarm between two instructions of it would be raised in the middle of the transport, and
    what was read be lost."""
    frames: list[Any] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if frame.f_code.co_filename == "<string>":
            frames.append(frame)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        Pair(1, 2)
    finally:
        sys.settrace(before)
    (frame,) = frames
    assert interrupts._is_nobodys(frame, frame.f_code, frame.f_code.co_filename)


# Waits.


def wait_too_long(to: str) -> float:
    """Seconds after which an alarm ends a call."""
    started = time.monotonic()
    with pytest.raises(Late), alarm_in(0.05):
        rpc.rpc_sync(to, time.sleep, args=(60,))
    return time.monotonic() - started


def test_an_alarm_ends_a_wait_soon(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(rpc.rpc_sync, "b", functions.nothing)
    assert job["a"].do(wait_too_long, "b") < 20
    assert job["a"].do(wait_too_long, "a") < 20
    assert job["a"].do(rpc.rpc_sync, "b", functions.who_am_i) == "b"


def send_for_ever(to: str) -> None:
    while True:
        rpc.rpc_async(to, functions.nothing_with, args=(b"x" * (1 << 22),), timeout=30)


def send_to_one_who_does_not_read(to: str) -> float:
    started = time.monotonic()
    with pytest.raises(Late), alarm_in(0.2):
        send_for_ever(to)
    return time.monotonic() - started


def test_an_alarm_ends_a_write_that_does_not_get_on_and_loses_nothing(make_job: MakeJob) -> None:
    job = make_job("a", "b", liveness=60.0)
    job["a"].do(rpc.rpc_sync, "b", functions.nothing)
    job["b"].signal(signal.SIGSTOP)
    try:
        assert job["a"].do(send_to_one_who_does_not_read, "b") < 20
    finally:
        job["b"].signal(signal.SIGCONT)
    assert job["a"].do(rpc.rpc_sync, "b", functions.who_am_i) == "b"


# Event loops.


def hears_of_signals(count: int) -> tuple[int, int]:
    """An event loop hears of signals by a descriptor: how often, and how often a handler ran."""
    handled: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    main = threading.main_thread().ident
    assert main is not None
    for number in range(1, count + 1):
        # As in the middle of a write: its handler is put off, and the knocks come in user code.
        interrupts._is_shielded = lambda frame: True  # type: ignore[assignment]
        signal.raise_signal(signal.SIGUSR2)
        interrupts._is_shielded = is_shielded  # type: ignore[assignment]
        until = time.monotonic() + 30
        while len(handled) < number and time.monotonic() < until:
            pass
    signal.set_wakeup_fd(-1)
    return os.read(reading, 4096).count(int(signal.SIGUSR2)), len(handled)


is_shielded = interrupts._is_shielded


def test_a_signal_that_was_put_off_comes_once_to_an_event_loop(make_job: MakeJob) -> None:
    assert make_job("a")["a"].do(hears_of_signals, 20) == (20, 20)


def handles_what_knocks_are() -> tuple[int, int]:
    """The program has a handler for the very signal by which put off ones are told of."""
    urgent: list[int] = []
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    assert signal.signal(signal.SIGURG, lambda number, _: urgent.append(number)) is signal.SIG_DFL
    heard = hears_of_signals(3)
    assert heard == (3, 3)
    before = len(urgent)
    signal.raise_signal(signal.SIGURG)
    after = len(urgent)
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    signal.raise_signal(signal.SIGURG)
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    return before, after


def test_a_program_may_handle_the_signal_of_knocks(make_job: MakeJob) -> None:
    assert make_job("a")["a"].do(handles_what_knocks_are) == (0, 1)


# Joining and leaving.


def join_and_leave_under_alarms(times: int, seed: int = SEED) -> tuple[list[str], int]:
    """What is left of jobs of one worker: in the directory of all jobs, and of descriptors."""
    directory = tempfile.mkdtemp(prefix="tg-", dir="/tmp")
    os.environ["XDG_RUNTIME_DIR"] = directory
    stores = iter([os.path.join(directory, f"store{number}") for number in range(times + 1)])

    def join_and_leave() -> None:
        rpc.init_rpc("a", rank=0, world_size=1, init_method=f"file://{next(stores)}")
        rpc.shutdown()

    join_and_leave()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(times):
        interrupt_often(join_and_leave, 1, seed + number, 0.02)
        if rpc.is_initialized():
            rpc.shutdown()
    gc.collect()
    left = [name for name in os.listdir(directory) if not name.startswith("store")]
    opened = len(os.listdir("/proc/self/fd")) - before
    shutil.rmtree(directory)
    return left, opened


def test_a_job_that_is_joined_or_left_under_alarms_leaves_nothing(
    start: Callable[[], Process],
) -> None:
    assert start().do(join_and_leave_under_alarms, 150) == ([], 0)
