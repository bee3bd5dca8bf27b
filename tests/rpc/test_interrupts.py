"""Ctrl-C at any moment of a call: that call is given up, and nothing else."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable

import pytest

from telegrad import rpc
from tests.rpc import functions
from tests.rpc.fleet import Job

SEED = 20261116
INTERRUPTS = 300
LONGEST = 0.002


def answer_of(to: str) -> str:
    """The answer to a call. An interrupt that was put off may come only now."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return rpc.rpc_sync(to, functions.who_am_i, timeout=20)


def interrupt_often(to: str) -> int:
    """Interrupt calls after random times; the next call must go through."""
    draw = random.Random(SEED)
    caught = 0
    handle = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGALRM, lambda _, frame: handle(signal.SIGINT, frame))
    try:
        for _ in range(INTERRUPTS):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, LONGEST))
                rpc.rpc_sync(to, functions.who_am_i)
            except KeyboardInterrupt:
                caught += 1
            while signal.getitimer(signal.ITIMER_REAL)[0]:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert answer_of(to) == to
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return caught


@pytest.mark.slow
def test_an_interrupted_call_leaves_the_link_to_others(make_job: Callable[..., Job]) -> None:
    job = make_job("a", "b")
    assert job["a"].do(interrupt_often, "b") > INTERRUPTS / 20
