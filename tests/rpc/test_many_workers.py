"""Sixty-four workers on one machine: they start, each calls each, and all leave."""

from __future__ import annotations

import time

import pytest
import torch

from telegrad import rpc
from tests.rpc import functions
from tests.rpc.fleet import Nursery, Process, join, serve_store

WORKERS = 64


def call_everyone() -> int:
    me = rpc.get_worker_info().id
    futures = [
        rpc.rpc_async(info, torch.add, args=(torch.tensor(info.id), me))
        for info in rpc.get_worker_infos()
    ]
    return sum(int(future.wait()) for future in futures)


@pytest.mark.slow
def test_sixty_four_workers_start_call_all_to_all_and_leave(nursery: Nursery) -> None:
    store = serve_store()
    started = time.monotonic()
    processes: list[Process] = [nursery.start() for _ in range(WORKERS)]
    try:
        joining = [
            process.begin(join, f"w{rank}", rank, WORKERS, store.port)
            for rank, process in enumerate(processes)
        ]
        for each in joining:
            each.result(60)
        joined = time.monotonic()
        sums = [process.begin(call_everyone) for process in processes]
        ids = sum(range(WORKERS))
        assert [each.result(90) for each in sums] == [ids + WORKERS * me for me in range(WORKERS)]
        called = time.monotonic()
        leaving = [process.begin(rpc.shutdown) for process in processes]
        for each in leaving:
            each.result(60)
        left = time.monotonic()
        print(
            f"join {joined - started:.1f} s, calls {called - joined:.1f} s, {left - called:.1f} s"
        )
        for process in processes:
            assert "Traceback" not in process.end(), process.errors
        assert functions.recorded == []
    finally:
        for process in processes:
            process.kill()
