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


is_crowded = lookout.is_crowded


@pytest.fixture(autouse=True)
def rested(monkeypatch):
    """As in a process that has just begun, on a machine with nothing else to do: a job of another
    test may have been kept from looking, and then nobody looks for a while."""
    monkeypatch.setattr(lookout, "is_crowded", lambda: False)
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
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "LONG", 0.0)
    look = Lookout(looking_at(pair[0]))
    pair[1].send(b"x")
    assert look.wait()
    pair[0].recv(1)
    look.ended(came=True)
    assert asked_for(look) < 30.0
    monkeypatch.setattr(lookout, "LONG", 60.0)
    look.ended(came=True)
    pair[1].send(b"x")
    assert look.wait()


class Patient:
    """Sees nothing for so many looks, and notes how long it was asked to wait for something."""

    def __init__(self, looks: int) -> None:
        self.asked: list[int] = []
        self._left = looks

    def __call__(self, milliseconds: int) -> bool:
        self.asked.append(milliseconds)
        self._left -= 1
        return self._left < 0


def test_a_reader_sleeps_until_shortly_before_what_takes_a_while(monkeypatch):
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    monkeypatch.setattr(lookout, "CROWDED", 60.0)
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "LONG", 60.0)
    sees = Patient(5)
    look = Lookout(sees)
    look._expected[7] = 10.0
    assert look.wait(7)
    assert sees.asked == [0, 9000, 0, 0, 0, 0]
    assert look._expected[7] < 10.0  # It came sooner: the sleep did not take the time it said.
    sees = Patient(5)
    look = Lookout(sees)
    look._expected[7] = 10.0
    assert look.wait(8)
    assert sees.asked == [0] * 6


def test_what_comes_while_a_reader_sleeps_is_noticed_at_once(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LONG", 60.0)
    look = Lookout(looking_at(pair[0]))
    look._expected[0] = 60.0
    sender = threading.Timer(0.05, pair[1].send, (b"x",))
    sender.start()
    assert look.wait()
    assert look._expected[0] < 30.0
    sender.join()


def test_what_took_longer_once_is_looked_for_a_little_later_and_what_took_long_not_at_all(pair):
    look = Lookout(looking_at(pair[0]))
    look._expected[0] = 0.002
    look._note(0.006)
    assert look._expected[0] == pytest.approx(0.003)
    look._note(10.0)
    assert look._expected[0] == 10.0
    assert not look.wait()


def test_a_wait_that_goes_on_is_one_wait_and_costs_one_look(monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 0.0)
    sees = Patient(1000)
    look = Lookout(sees)
    assert not look.wait()
    looked = len(sees.asked)
    for _ in range(3):
        look.ended(came=False)
        assert not look.wait()
    assert len(sees.asked) == looked
    look._asked -= 2 * lookout.LONG
    look.ended(came=True)
    assert look._expected[0] > 2 * lookout.LONG


def test_a_reader_remembers_only_so_many_kinds_of_waits(pair):
    look = Lookout(looking_at(pair[0]))
    pair[1].send(b"x")
    for number in range(3 * lookout.MOST_EXPECTED):
        assert look.wait(number)
    assert 0 < len(look._expected) <= lookout.MOST_EXPECTED


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


def test_on_a_crowded_machine_nobody_naps_in_order_to_look(monkeypatch):
    monkeypatch.setattr(lookout, "is_crowded", lambda: True)
    sees = Patient(5)
    look = Lookout(sees)
    look._expected[7] = 10 * lookout.WORTH_A_NAP
    assert not look.wait(7)
    assert sees.asked == [0]


def test_on_a_crowded_machine_one_round_of_slow_looks_is_enough(pair, monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "KEPT_AWAY", 60.0)
    monkeypatch.setattr(lookout, "CROWDED", -1.0)
    monkeypatch.setattr(lookout, "is_crowded", lambda: True)
    sees = Patient(10 * lookout.LOOKS)
    assert not Lookout(sees).wait()
    assert len(sees.asked) == 1 + lookout.LOOKS
    assert Lookout._resting_until > 0.0


def test_how_many_want_to_run_is_read_where_the_system_tells(tmp_path, monkeypatch):
    told = tmp_path / "loadavg"
    monkeypatch.setattr(lookout, "_RUNNABLE", str(told))
    assert not is_crowded()
    for runnable, crowded in ((lookout._MOST_RUNNABLE, False), (lookout._MOST_RUNNABLE + 1, True)):
        told.write_text(f"0.20 0.18 0.12 {runnable}/80 11206\n")
        assert is_crowded() is crowded
    told.write_text("nothing of the kind")
    assert not is_crowded()


def test_a_wait_takes_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_FOR", 60.0)
    monkeypatch.setattr(lookout, "LONG", 60.0)
    sees = Patient(1 << 30)
    look = Lookout(sees)
    look._expected[7] = 30.0
    assert not look.wait(7, 0.001)
    assert sees.asked[:2] == [0, 1]
