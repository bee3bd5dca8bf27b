"""Coroutines on a worker: one that goes wrong is no other's trouble."""

from __future__ import annotations

import sys
import threading

import pytest

from telegrad import rpc
from tests.rpc import functions
from tests.rpc.fleet import Process

pytestmark = pytest.mark.usefixtures("workers")


async def leave() -> None:
    sys.exit(7)


async def say(word: str) -> str:
    return word


async def call_and_block(to: str) -> None:
    rpc.rpc_sync(to, functions.nothing)


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
