"""Memory that is used again when the last tensor in it has died, and not before."""

from __future__ import annotations

import gc
import os
import random
import threading

import numpy as np
import pytest
import torch

from telegrad.wire import warm as room
from telegrad.wire.warm import LEAST, WarmMemory

SEED = 20261119


def place(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_block_is_used_again_when_the_last_view_of_it_has_died() -> None:
    pool = WarmMemory()
    array = pool.array(LEAST)
    first = place(array)
    tensor = torch.from_numpy(array)[5:].view(torch.uint8)[3:]
    del array
    gc.collect()
    other = pool.array(LEAST)
    assert place(other) != first, "a tensor still sees it"
    del tensor
    gc.collect()
    assert place(pool.array(LEAST)) == first


def test_small_arrays_are_left_to_the_allocator() -> None:
    pool = WarmMemory()
    del_me = pool.array(LEAST - 1)
    assert del_me.size == LEAST - 1
    del del_me
    assert pool.trim() == 0


def test_idle_memory_is_bounded_and_the_oldest_goes_first() -> None:
    pool = WarmMemory(limit=3 * LEAST)
    arrays = [pool.array(LEAST) for _ in range(5)]
    places = [place(array) for array in arrays]
    while arrays:
        del arrays[0]
    assert pool.trim() == 3 * LEAST
    again = [pool.array(LEAST) for _ in range(3)]
    assert {place(array) for array in again} == set(places[2:])


def test_what_nobody_wanted_for_a_while_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    pool = WarmMemory()
    del_me = pool.array(LEAST)
    del del_me
    assert pool.trim() == LEAST
    now += room.PERIOD + 1
    assert pool.trim() == 0


def test_threads_never_share_a_block() -> None:
    pool = WarmMemory(limit=8 * LEAST)
    wrong: list[int] = []

    def work(mark: int) -> None:
        draw = random.Random(SEED + mark)
        held: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        for _ in range(60):
            array = pool.array(draw.choice((LEAST, LEAST + 1, 2 * LEAST)))
            array[::4096] = mark
            held.append(array)
            if len(held) > 3:
                old = held.pop(draw.randrange(len(held)))
                if (old[::4096] != mark).any():
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_has_a_copy() -> None:
    array = WarmMemory().array(LEAST)
    array[:] = 1
    child = os.fork()
    if child == 0:
        array[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert (array == 1).all()
