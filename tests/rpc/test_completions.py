"""Callbacks of calls that were settled together may wait for each other."""

from __future__ import annotations

import threading
from typing import Any

from telegrad.rpc.calls import Pending
from telegrad.rpc.completions import Completions
from telegrad.rpc.worker import WorkerInfo


def settled(completion: Any) -> Pending:
    pending = Pending(1, WorkerInfo("a", 1), "f", 0, 0)
    pending.completion = [completion]
    return pending


def lend(work: Any) -> None:
    threading.Thread(target=work, daemon=True).start()


def later(delay: float, work: Any) -> None:
    threading.Timer(delay, work).start()


def test_one_that_waits_for_the_next_does_not_wait_in_vain() -> None:
    reached = threading.Event()
    waited: list[bool] = []
    chain = [threading.Event() for _ in range(4)]
    first = settled(lambda: waited.append(reached.wait(30)))
    others = [settled(event.set) for event in chain]
    last = settled(reached.set)
    Completions([first, *others, last], lend, later).run()
    assert waited == [True]
    assert all(event.is_set() for event in chain)


def test_each_is_completed_once_whoever_comes() -> None:
    counts: list[int] = []
    batch = Completions([settled(lambda n=n: counts.append(n)) for n in range(500)], lend, later)
    threads = [threading.Thread(target=batch.run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == list(range(500))


def test_one_alone_asks_for_no_help() -> None:
    asked: list[float] = []
    done: list[None] = []
    Completions(
        [settled(lambda: done.append(None))], lend, lambda delay, work: asked.append(delay)
    ).run()
    assert (len(done), asked) == (1, [])
