"""Contexts of one worker: ids, threads, and the memory of what is gone."""

from __future__ import annotations

import threading

import pytest

from telegrad.autograd.container import Census, Container
from telegrad.autograd.context import Context, RecvRecord
from telegrad.autograd.errors import AutogradError, UnknownContext
from telegrad.rpc.limits import unlimited


def test_a_context_of_a_worker_that_is_none_is_not_made() -> None:
    container = Container(1, may_be_worker=[0, 1, 2].__contains__)
    assert container.join((65535 << 48) + 1, 2) is None
    assert container.join((2 << 48) + 1, 2) is not None
    assert len(container) == 1


def test_an_id_has_its_worker_in_the_upper_16_bits_and_a_counter_below() -> None:
    container = Container(7)
    first, second = container.new().id, container.new().id
    assert first == (7 << 48) + 1
    assert second == (7 << 48) + 2


@pytest.mark.parametrize("worker", [-1, 65536])
def test_a_worker_id_that_does_not_fit_is_refused(worker: int) -> None:
    with pytest.raises(AutogradError, match=r"0\.\.65535"):
        Container(worker)


def test_the_largest_worker_id_is_fine() -> None:
    assert Container(65535).new().origin == 65535


def test_running_out_of_ids_is_an_error() -> None:
    container = Container(3, first=(1 << 48) - 1)
    assert container.new().id == container.max_id == (3 << 48) + (1 << 48) - 1
    with pytest.raises(AutogradError, match="has issued all"):
        container.new()


def test_an_unknown_context_is_named() -> None:
    with pytest.raises(UnknownContext, match="Could not find autograd context with id: 42"):
        Container(0).get(42)


def test_a_context_of_another_worker_appears_when_a_message_carries_it() -> None:
    container = Container(1)
    context = container.join(5, sender=4)
    assert context is not None
    assert container.get(5) is context
    assert context.known_workers == {4}


def test_a_late_message_does_not_bring_back_a_released_context() -> None:
    origin, other = Container(0), Container(1)
    context = origin.new()
    other.join(context.id, sender=0)
    assert origin.release_own(context.id) is context
    assert [gone.id for gone in other.learn(origin.census())] == [context.id]
    assert other.join(context.id, sender=0) is None
    assert origin.join(context.id, sender=1) is None
    assert len(origin) == len(other) == 0


def test_a_release_that_overtakes_the_first_message_is_remembered() -> None:
    origin, other = Container(0), Container(1)
    context = origin.new()
    assert origin.release_own(context.id) is context
    other.learn(origin.census())
    assert other.join(context.id, sender=0) is None


def test_a_live_context_survives_the_release_of_younger_ones() -> None:
    origin, other = Container(0), Container(1)
    old = origin.new()
    other.join(old.id, sender=0)
    for _ in range(100):
        assert origin.release_own(origin.new().id) is not None
        assert other.learn(origin.census()) == []
    assert other.find(old.id) is not None


def test_the_memory_of_released_contexts_does_not_grow() -> None:
    origin, other = Container(0), Container(1)
    origin.new()
    for _ in range(1000):
        assert origin.release_own(origin.new().id) is not None
        other.learn(origin.census())
    assert list(other._census) == [0]
    assert len(other._census[0].live) == 1


def test_an_old_census_does_not_undo_a_newer_one() -> None:
    other = Container(1)
    other.learn(Census(0, 2, newest=5, live=frozenset()))
    other.learn(Census(0, 1, newest=4, live=frozenset({3})))
    assert other.join(3, sender=0) is None


def test_a_census_heals_a_worker_that_missed_a_release() -> None:
    other = Container(1)
    missed = other.join(3, sender=0)
    assert missed is not None
    assert other.learn(Census(0, 9, newest=20, live=frozenset({15}))) == [missed]


def test_contexts_of_a_lost_worker_end_and_do_not_come_back() -> None:
    container = Container(1)
    context = container.join(2 << 48 | 1, sender=2)
    assert container.lose(2) == [context]
    assert container.join(2 << 48 | 1, sender=3) is None


def test_a_message_of_a_lost_worker_that_is_read_late_brings_nothing_back() -> None:
    container = Container(1)
    container.lose(2)
    assert container.join(2 << 48 | 1, sender=2) is None
    assert len(container) == 0


def test_many_threads_make_and_release_at_once() -> None:
    container = Container(0)
    ids: list[int] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(200):
            context = container.new()
            ids.append(context.id)
            assert container.get(context.id) is context
            assert container.release_own(context.id) is not None

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 1600
    assert len(container) == 0


def test_earlier_contexts_of_an_origin_are_told_of_once_and_stay_known() -> None:
    container = Container(1)
    first, second, third = ((2 << 48) + number for number in (1, 2, 3))
    of_another = container.join((3 << 48) + 1, sender=3)
    earlier = [container.join(first, sender=2), container.join(second, sender=2)]
    newest = container.join(third, sender=2)
    assert newest is not None
    assert container.take_earlier(newest) == earlier
    assert container.take_earlier(newest) == []
    assert container.join(first, sender=2) is earlier[0]
    assert of_another is not None
    assert container.take_earlier(of_another) == []


def test_contexts_that_a_census_has_ended_are_not_told_of_as_earlier() -> None:
    container = Container(1)
    first, second = (2 << 48) + 1, (2 << 48) + 2
    container.join(first, sender=2)
    newest = container.join(second, sender=2)
    assert newest is not None
    container.learn(Census(2, 1, second, frozenset({second})))
    assert container.take_earlier(newest) == []


@pytest.mark.parametrize("peers", [(2,), (2, 3)])
def test_a_context_that_ends_gives_back_what_it_kept_for_workers(
    peers: tuple[int, ...],
) -> None:
    records = unlimited()
    context = Context(1, records)
    for message, peer in enumerate(peers * 2):
        context.know(peer)
        context.add_recv(RecvRecord(message, peer, ()), ())
    assert [records.count(peer) for peer in peers] == [2] * len(peers)
    context.let_go()
    assert [records.count(peer) for peer in peers] == [0] * len(peers)
