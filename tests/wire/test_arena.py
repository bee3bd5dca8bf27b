from __future__ import annotations

import fcntl
import gc
import mmap
import multiprocessing
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.wire.arena import Arena, ArenaError, ArenaView, size_class
from tests.rpc.inside import when_settled

PAGE = mmap.PAGESIZE
MB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(16 * MB)
    yield arena
    arena.close()


@pytest.fixture
def freed() -> deque[int]:
    return deque()


@pytest.fixture
def view(arena: Arena, freed: deque[int]) -> ArenaView:
    return ArenaView(arena.fd, freed.append)


def place(arena: Arena, data: bytes | np.ndarray) -> int:
    offset = arena.place(memoryview(data))
    assert offset is not None
    return offset


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("telegrad-arena")


def resident(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


@given(st.integers(1, 1 << 40))
def test_a_size_class_wastes_at_most_a_quarter_or_a_page(size: int) -> None:
    slot = size_class(size)
    assert slot % PAGE == 0
    assert size <= slot < size + max(PAGE, size // 4 + 1)


def test_there_are_four_size_classes_per_power_of_two() -> None:
    classes = {size_class(size) for size in range(MB + 1, 2 * MB + 1, PAGE)}
    assert len(classes) == 4


def test_what_is_placed_is_seen_on_the_other_side(arena: Arena, view: ArenaView) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * MB // 2, np.uint8)
    array = view.array(place(arena, data), data.size)
    assert array.dtype == np.uint8
    assert array.flags.writeable
    assert (array == data).all()


def test_any_contiguous_view_can_be_placed(arena: Arena, view: ArenaView) -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    matrix.flags.writeable = False
    assert view.array(place(arena, matrix), 48).tobytes() == matrix.tobytes()
    assert arena.place(memoryview(b"")) is None
    with pytest.raises((ValueError, BufferError)):
        arena.place(memoryview(matrix.T))
    assert arena.use.lent == PAGE


def test_a_slot_is_free_when_the_last_view_dies(
    arena: Arena, view: ArenaView, freed: deque[int]
) -> None:
    offset = place(arena, b"x" * 100_000)
    array = view.array(offset, 100_000)
    slices = [array[10:], array[10:][5:], array.view(np.int32)[3:], array.reshape(10, -1).T]
    buffer = memoryview(slices[-1])
    del array
    while slices:
        slices.pop()
        gc.collect()
        assert not freed
    assert buffer[0, 0] == ord("x")
    buffer.release()
    assert list(freed) == [offset]
    assert view.in_use == 0


def test_a_tensor_keeps_its_slot(arena: Arena, view: ArenaView, freed: deque[int]) -> None:
    source = torch.arange(50_000, dtype=torch.float32)
    offset = place(arena, source.numpy())
    tensor = torch.from_numpy(view.array(offset, 200_000).view(np.float32)).reshape(500, 100)
    row = tensor[7].detach().requires_grad_()
    loss = (row * row).sum()
    del tensor
    gc.collect()
    assert not freed
    loss.backward()
    assert torch.equal(row.grad, 2 * source[700:800])
    del row, loss
    gc.collect()
    assert list(freed) == [offset]


def test_a_slot_in_a_reference_cycle_is_freed_once(
    arena: Arena, view: ArenaView, freed: deque[int]
) -> None:
    offset = place(arena, b"y" * 5000)
    cycle: list[object] = [view.array(offset, 5000)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    gc.collect()
    assert list(freed) == [offset]


def test_a_slot_can_be_lent_again_as_soon_as_it_is_told_free(arena: Arena) -> None:
    again: list[np.ndarray] = []

    def lend_again(offset: int) -> None:
        if not again:
            again.append(view.array(offset, 10))

    view = ArenaView(arena.fd, lend_again)
    view.array(place(arena, b"z" * 10), 10)
    assert view.in_use == 1
    assert again


def test_arrays_that_die_in_many_threads_are_told_once_each(
    arena: Arena, view: ArenaView, freed: deque[int]
) -> None:
    offsets = [place(arena, bytes(PAGE)) for _ in range(400)]
    arrays = deque(view.array(offset, PAGE) for offset in offsets)

    def drop() -> None:
        while True:
            try:
                array = arrays.popleft()
            except IndexError:
                return
            assert array.size == PAGE

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(freed) == sorted(offsets)


def test_arrays_outlive_view_and_arena(freed: deque[int]) -> None:
    arena = Arena(MB)
    view = ArenaView(arena.fd, freed.append)
    array = view.array(place(arena, b"still here"), 10)
    view.close()
    arena.close()
    del view, arena
    gc.collect()
    assert array.tobytes() == b"still here"
    del array
    assert not freed


def test_the_last_freed_slot_of_a_class_is_used_first(arena: Arena) -> None:
    first, second = place(arena, bytes(100_000)), place(arena, bytes(100_000))
    arena.release(first)
    arena.release(second)
    assert place(arena, bytes(99_000)) == second
    assert place(arena, bytes(99_000)) == first


def test_a_full_arena_says_so_and_recovers() -> None:
    arena = Arena(8 * PAGE)
    offsets = [place(arena, bytes(2 * PAGE)) for _ in range(4)]
    assert arena.place(memoryview(bytes(1))) is None
    assert arena.use.refused == 1
    assert arena.use.lent == arena.use.high_water == 8 * PAGE
    arena.release(offsets[2])
    assert place(arena, bytes(2 * PAGE)) == offsets[2]
    assert arena.place(memoryview(bytes(9 * PAGE))) is None
    arena.close()


def test_what_had_no_room_is_not_looked_for_again_until_something_is_given_back() -> None:
    arena = Arena(64 * PAGE)
    page, two = memoryview(bytes(PAGE)), memoryview(bytes(2 * PAGE))
    lent = [arena.place(page) for _ in range(64)]
    for offset in lent[::2]:
        assert offset is not None
        arena.release(offset)
    assert arena.place(two) is None, "no two pages lie together"
    arena._slots._open.clear()  # Whoever looks for room now finds none.
    assert arena._slots._too_large == 2 * PAGE
    assert arena.place(two) is None
    assert lent[1] is not None
    arena.release(lent[1])
    assert arena._slots._too_large > arena._slots.limit


def test_free_slots_of_other_classes_are_merged_when_room_runs_out() -> None:
    arena = Arena(64 * PAGE)
    small = [place(arena, bytes(PAGE)) for _ in range(64)]
    for offset in small:
        arena.release(offset)
    large = place(arena, bytes(64 * PAGE))
    arena.release(large)
    assert {place(arena, bytes(PAGE)) for _ in range(64)} == set(small)
    arena.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE), st.integers(0, 99))))
@settings(max_examples=60, deadline=None)
def test_lent_slots_never_overlap_and_never_pass_the_limit(
    steps: list[tuple[bool, int, int]],
) -> None:
    arena = Arena(128 * PAGE)
    lent: list[tuple[int, bytes]] = []
    memory = ArenaView(arena.fd, lambda offset: None)
    for step, (take, size, pick) in enumerate(steps):
        if pick == 0:
            arena.trim()
        if take or not lent:
            data = bytes([step % 251]) * size
            offset = arena.place(memoryview(data))
            if offset is not None:
                lent.append((offset, data))
        else:
            arena.release(lent.pop(pick % len(lent))[0])
    for offset, data in lent:
        assert memory.array(offset, len(data)).tobytes() == data
    assert arena.use.lent == sum(size_class(len(data)) for _, data in lent) <= arena.use.limit
    for offset, _ in lent:
        arena.release(offset)
    assert place(arena, bytes(128 * PAGE)) == 0, "some of the room was lost"
    arena.close()


@pytest.mark.parametrize("offset", [-1, 1, PAGE, 1 << 63])
def test_giving_back_what_was_not_lent_is_refused(arena: Arena, offset: int) -> None:
    lent = place(arena, b"a")
    with pytest.raises(ArenaError, match="is not lent"):
        arena.release(offset)
    arena.release(lent)
    with pytest.raises(ArenaError, match="is not lent"):
        arena.release(lent)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 1), (0, 0), (0, -1), (0, 16 * MB + 1), (16 * MB, 1), (1 << 64, 1), (16 * MB - 1, 2)],
)
def test_bounds_are_checked(view: ArenaView, offset: int, length: int) -> None:
    with pytest.raises(ArenaError, match="lie outside"):
        view.array(offset, length)


def test_a_slot_cannot_be_received_twice_at_once(view: ArenaView) -> None:
    array = view.array(0, 10)
    with pytest.raises(ArenaError, match="still in use"):
        view.array(0, 10)
    del array
    view.array(0, 10)


def test_the_file_is_sealed_and_descriptors_do_not_leak_to_programs(arena: Arena) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 32 * MB)
    assert not os.get_inheritable(arena.fd)


def test_memory_that_could_shrink_is_refused() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ArenaError, match="not sealed"):
        ArenaView(unsealed, print)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    ArenaView(unsealed, print).close()
    os.close(unsealed)
    with open(os.devnull, "rb") as file, pytest.raises(ArenaError, match="not sealed"):
        ArenaView(file.fileno(), print)


def test_untouched_memory_costs_nothing() -> None:
    arena = Arena(1 << 40)
    assert resident(arena) == 0
    place(arena, bytes(MB))
    assert resident(arena) == MB
    arena.close()


def test_trim_gives_back_what_lay_unused_for_a_whole_interval(arena: Arena) -> None:
    offsets = [place(arena, bytes(MB)) for _ in range(4)]
    for offset in offsets:
        arena.release(offset)
    assert arena.trim() == 0, "just used"
    arena.release(place(arena, bytes(MB)))
    assert arena.trim() == 3 * MB, "one of four was used in between"
    assert resident(arena) == arena.use.idle == MB
    assert arena.trim() == MB
    assert resident(arena) == arena.use.idle == 0
    assert place(arena, bytes(16 * MB)) == 0


def test_trim_finds_the_pages_of_merged_slots(arena: Arena) -> None:
    for offset in [place(arena, bytes(MB)) for _ in range(16)]:
        arena.release(offset)
    place(arena, bytes(7 * MB))
    assert arena.trim() == 9 * MB
    assert resident(arena) == 7 * MB
    assert place(arena, bytes(8 * MB)) == 7 * MB


def test_trim_leaves_what_is_lent_alone(arena: Arena, view: ArenaView) -> None:
    kept = place(arena, b"k" * MB)
    for size in (MB, 2 * MB):
        arena.release(place(arena, bytes(size)))
    array = view.array(kept, MB)
    arena.release(place(arena, bytes(14 * MB)))
    for _ in range(3):
        arena.trim()
    assert resident(arena) == MB
    assert array.tobytes() == b"k" * MB


def test_placing_in_many_threads_keeps_slots_apart(arena: Arena, view: ArenaView) -> None:
    def place_and_check(number: int) -> None:
        data = bytes([number]) * (40_000 + number)
        for _ in range(50):
            offset = place(arena, data)
            array = view.array(offset, len(data))
            assert (array == number).all()
            del array
            arena.release(offset)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(place_and_check, range(8)))
    assert arena.use.lent == 0


def test_a_closed_arena_has_no_room_and_no_descriptor() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    arena = Arena(MB)
    place(arena, b"x")
    arena.close()
    arena.close()
    assert arena.place(memoryview(b"x")) is None
    assert arena.trim() == 0
    del arena
    assert sorted(os.listdir("/proc/self/fd")) == before


def lend_tensors(link: socket.socket, sizes: list[int], control: Connection) -> None:
    """A sender: passes its arena, lends one slot per size, takes back what it is told."""
    arena = Arena(64 * MB)
    socket.send_fds(link, [b"A"], [arena.fd])
    for number, size in enumerate(sizes):
        data = np.full(size, number + 1, np.uint8)
        control.send(arena.place(memoryview(data)))
    for _ in sizes:
        arena.release(control.recv())
    control.send(arena.use.lent)
    control.recv()


def start_sender(sizes: list[int]) -> tuple[multiprocessing.process.BaseProcess, int, Connection]:
    context = multiprocessing.get_context("fork")
    here, there = socket.socketpair()
    control, remote = context.Pipe()
    sender = context.Process(target=lend_tensors, args=(there, sizes, remote))
    sender.start()
    there.close()
    remote.close()
    _, (fd,), _, _ = socket.recv_fds(here, 1, 1)
    here.close()
    return sender, fd, control


def test_two_processes_share_slots_and_return_them(freed: deque[int]) -> None:
    sizes = [70_000, 5 * MB, 1]
    sender, fd, control = start_sender(sizes)
    view = ArenaView(fd, freed.append)
    os.close(fd)
    for number, size in enumerate(sizes):
        tensor = torch.from_numpy(view.array(control.recv(), size))
        assert int(tensor.min()) == int(tensor.max()) == number + 1
        del tensor
        control.send(freed.pop())
    assert control.recv() == 0
    control.send(None)
    sender.join(30)
    assert sender.exitcode == 0


def test_a_killed_sender_leaves_its_tensors_valid_and_no_files(freed: deque[int]) -> None:
    files_before, mapped_before = set(os.listdir("/dev/shm")), mapped_arenas()
    sender, fd, control = start_sender([3 * MB])
    view = ArenaView(fd, freed.append)
    os.close(fd)
    array = view.array(control.recv(), 3 * MB)
    os.kill(sender.pid, signal.SIGKILL)
    sender.join(30)
    assert (array == 1).all()
    del array, view
    # Those of other processes come and go.
    assert when_settled(lambda: set(os.listdir("/dev/shm")) <= files_before)
    assert mapped_arenas() == mapped_before
