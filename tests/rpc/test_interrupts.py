"""Ctrl-C at any moment of a call: that call is given up, and nothing else."""

from __future__ import annotations

import _thread
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from telegrad import rpc
from telegrad.rpc import interrupts
from tests.rpc import functions
from tests.rpc.fleet import Job

SEED = 20261116
INTERRUPTS = 300
LONGEST = 0.002


def interrupt_often(to: str) -> int:
    """Interrupt calls after random times; the next call must go through."""
    draw = random.Random(SEED)
    caught = 0
    handle = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGALRM, lambda _, frame: handle(signal.SIGINT, frame))
    for _ in range(INTERRUPTS):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, LONGEST))
            rpc.rpc_sync(to, functions.who_am_i)
            signal.setitimer(signal.ITIMER_REAL, 0)
            while interrupts._put_off_since is not None:
                time.sleep(interrupts.PAUSE)
        except KeyboardInterrupt:
            caught += 1
        assert rpc.rpc_sync(to, functions.who_am_i, timeout=20) == to
    signal.signal(signal.SIGALRM, before)
    return caught


def test_an_interrupted_call_leaves_the_link_to_others(make_job: Callable[..., Job]) -> None:
    job = make_job("a", "b")
    assert job["a"].do(interrupt_often, "b") > INTERRUPTS / 20


def test_one_interrupt_is_raised_once(make_job: Callable[..., Job]) -> None:
    """What was put off is knocked about until it is raised, and then no more."""
    assert make_job("a")["a"].do(raise_put_off_while_knocking)


def raise_put_off_while_knocking() -> bool:
    for _ in range(20):
        knocking = threading.Thread(target=interrupts._knock)
        with pytest.raises(KeyboardInterrupt):
            be_interrupted(knocking)
        knocking.join()
        interrupts._knocked = True
        _thread.interrupt_main()
    return True


def be_interrupted(knocking: threading.Thread) -> None:
    interrupts._put_off_since = time.monotonic()
    knocking.start()
    interrupts.raise_if_put_off()
