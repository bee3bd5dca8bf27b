"""Looking for bytes before sleeping for them."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from telegrad.wire import lookout
from telegrad.wire.lookout import Lookout, looking_at


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture(autouse=True)
def rested(monkeypatch):
    """As in a process that has just begun: a job of another test may have been kept from looking,
    and then nobody looks for a while."""
    monkeypatch.setattr(Lookout, "_resting_until", 0.0)
    monkeypatch.setattr(Lookout, "_rest", lookout.REST_FOR)


def asked_for(look: Lookout) -> float:
    """Seconds that a wait for nothing looks."""
    start = time.monotonic()
    look.wait()
    return time.monotonic() - start


def test_a_reader_that_was_served_soon_looks_for_a_while_and_not_for_long(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 0.05)
    monkeypatch.setattr(lookout, "KEPT_AWAY", 10.0)
    monkeypatch.setattr(lookout, "CROWDED", 10.0)
    look = Lookout(looking_at(pair[0]))
    assert 0.05 <= asked_for(look) < 5.0


def test_a_reader_that_waited_long_sleeps_until_bytes_come_soon_again(pair, monkeypatch):
    monkeypatch.setattr(lookout, "KEPT_AWAY", 10.0)
    monkeypatch.setattr(lookout, "LOOK_FOR", 0.0)
    look = Lookout(looking_at(pair[0]))
    look.wait()
    look.came()
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    assert asked_for(look) < 30.0
    look.came()
    pair[1].send(b"x")
    look.wait()


def test_bytes_end_the_looking(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    monkeypatch.setattr(lookout, "CROWDED", 60.0)
    look = Lookout(looking_at(pair[0]))
    sender = threading.Timer(0.05, pair[1].send, (b"x",))
    sender.start()
    assert asked_for(look) < 30.0
    sender.join()


def test_nobody_looks_for_a_while_when_the_core_is_wanted_by_others(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", -1.0)
    monkeypatch.setattr(Lookout, "_rest", 60.0)
    monkeypatch.setattr(Lookout, "_resting_until", 0.0)
    assert asked_for(Lookout(looking_at(pair[0]))) < 30.0
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    assert asked_for(Lookout(looking_at(pair[1]))) < 30.0


def test_nobody_looks_for_a_while_where_many_look(pair, monkeypatch):
    """Who takes turns with many others is never kept away for long: each of its looks is slow."""
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    monkeypatch.setattr(lookout, "CROWDED", -1.0)
    monkeypatch.setattr(Lookout, "_rest", 60.0)
    monkeypatch.setattr(Lookout, "_resting_until", 0.0)
    assert asked_for(Lookout(looking_at(pair[0]))) < 30.0
    assert Lookout._resting_until > time.monotonic()


def test_who_asks_last_looks_and_the_one_before_sleeps(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    monkeypatch.setattr(lookout, "CROWDED", 60.0)
    first, second = Lookout(looking_at(pair[0])), Lookout(looking_at(pair[1]))
    asking = threading.Thread(target=asked_for, args=(first,))
    asking.start()
    while Lookout._looks != id(first):
        time.sleep(0)
    sender = threading.Timer(0.05, pair[0].send, (b"x",))
    sender.start()
    assert second.wait()
    asking.join(30.0)
    assert not asking.is_alive()
    sender.join()


def test_who_is_kept_away_again_and_again_rests_for_longer_until_looking_pays(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", -1.0)
    monkeypatch.setattr(Lookout, "_rest", lookout.REST_FOR)
    look = Lookout(looking_at(pair[0]))
    for times in (2, 4, 8):
        monkeypatch.setattr(Lookout, "_resting_until", 0.0)
        look.wait()
        assert Lookout._rest == times * lookout.REST_FOR
    monkeypatch.setattr(Lookout, "_resting_until", 0.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    monkeypatch.setattr(lookout, "CROWDED", 60.0)
    sender = threading.Timer(0.05, pair[1].send, (b"x",))
    sender.start()
    assert look.wait()
    assert Lookout._rest == lookout.REST_FOR
    sender.join()
