"""Who counts as silent: the core, and what its datagrams prove."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.rpc import pulse
from telegrad.rpc.heartbeat import Heartbeat
from telegrad.rpc.lookout import Lookout
from telegrad.rpc.pulse import (
    SIZE,
    Companion,
    Condition,
    answer,
    look_at,
    question,
    read_answer,
    read_question,
)
from telegrad.rpc.silence import Ask, GiveUp, Listening
from telegrad.rpc.vitals import Process
from tests.rpc.inside import descriptors

KEY = b"k" * 32
WINDOW, INTERVAL = 5.0, 0.5


class Clock:
    """A core under a clock that the test moves; it answers for those who are said to live."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core = Listening(WINDOW, INTERVAL)
        self.given_up: dict[int, tuple[float, str]] = {}
        self.condition: dict[int, Condition | None] = {}

    def follow(self, worker: int, condition: Condition | None = Condition.RUNS) -> None:
        self.core.follow(worker)
        self.condition[worker] = condition

    def run(self, seconds: float, interval: float = INTERVAL) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += interval
            for action in self.core.tick(self.now):
                self._carry_out(action)

    def _carry_out(self, action: Ask | GiveUp) -> None:
        if isinstance(action, GiveUp):
            assert action.worker not in self.given_up
            self.given_up[action.worker] = (self.now, action.reason)
            return
        condition = self.condition[action.worker]
        if condition is not None:
            verdict = self.core.answered(action.worker, action.nonce, condition)
            if verdict is not None:
                self._carry_out(verdict)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_that_answers_is_never_given_up(clock: Clock) -> None:
    clock.follow(1)
    clock.run(600)
    assert not clock.given_up


def test_one_that_falls_silent_is_given_up_within_the_window(clock: Clock) -> None:
    clock.follow(1)
    clock.follow(2)
    clock.run(10)
    silent_since = clock.now
    clock.condition[1] = None
    clock.run(20)
    assert list(clock.given_up) == [1]
    when, reason = clock.given_up[1]
    assert WINDOW - 2 * INTERVAL <= when - silent_since <= WINDOW
    assert "nothing has been heard" in reason


def test_one_that_is_stopped_is_given_up_within_the_window(clock: Clock) -> None:
    clock.follow(1)
    clock.run(10)
    stopped_since = clock.now
    clock.condition[1] = Condition.STOPPED
    clock.run(20)
    when, reason = clock.given_up[1]
    assert when - stopped_since <= WINDOW + INTERVAL
    assert "stopped" in reason


def test_one_that_is_stopped_for_a_moment_is_kept(clock: Clock) -> None:
    clock.follow(1)
    for _ in range(10):
        clock.condition[1] = Condition.STOPPED
        clock.run(WINDOW / 2)
        clock.condition[1] = Condition.RUNS
        clock.run(1)
    assert not clock.given_up


def test_one_whose_process_has_ended_is_given_up_at_once(clock: Clock) -> None:
    clock.follow(1, Condition.GONE)
    clock.run(INTERVAL)
    assert "ended" in clock.given_up[1][1]


def test_time_in_which_we_did_not_listen_is_not_held_against_others(clock: Clock) -> None:
    clock.follow(1)
    clock.run(5)
    clock.now += 3600
    clock.run(0.1)
    assert not clock.given_up
    clock.run(60)
    assert not clock.given_up


def test_one_that_never_answered_is_not_judged(clock: Clock) -> None:
    clock.follow(1, None)
    clock.run(600)
    assert not clock.given_up


def test_traffic_is_a_sign_of_life(clock: Clock) -> None:
    clock.follow(1)
    clock.run(5)
    clock.condition[1] = None
    for _ in range(100):
        clock.run(1)
        clock.core.heard(1)
    assert not clock.given_up
    clock.run(10)
    assert list(clock.given_up) == [1]


def test_an_answer_to_another_question_is_worth_nothing(clock: Clock) -> None:
    clock.follow(1)
    clock.run(5)
    clock.condition[1] = None
    for _ in range(20):
        clock.run(1)
        clock.core.answered(1, b"n" * 16, Condition.RUNS)
    assert list(clock.given_up) == [1]


def test_only_words_that_prove_the_key_are_read() -> None:
    asked = question(KEY, 7, b"n" * 16)
    said = answer(KEY, 7, b"n" * 16, Condition.STOPPED)
    assert read_question(KEY, asked) == (7, b"n" * 16)
    assert read_answer(KEY, said) == (7, b"n" * 16, Condition.STOPPED)
    assert len(asked) == len(said) == SIZE
    assert read_question(KEY, said) is None
    assert read_answer(KEY, asked) is None
    assert read_question(b"x" * 32, asked) is None
    for position in range(SIZE):
        bent = bytearray(said)
        bent[position] ^= 1
        assert read_answer(KEY, bytes(bent)) is None
    assert read_answer(KEY, said[:-1]) is None
    assert read_answer(KEY, said + b"\0") is None


def ask(companion: Companion, data: bytes) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.5)
        for _ in range(20):
            asking.sendto(data, companion.address)
            try:
                return asking.recv(100)
            except TimeoutError:
                if not data.startswith(b"tgpl"):
                    return None
    return None


def test_a_companion_answers_who_proves_the_key_and_nobody_else() -> None:
    me = Process.own()
    companion = Companion("127.0.0.1", KEY, 7, me.pid, me.born)
    try:
        said = ask(companion, question(KEY, 7, b"n" * 16))
        assert said is not None
        assert read_answer(KEY, said) == (7, b"n" * 16, Condition.RUNS)
        assert ask(companion, b"x" * SIZE) is None
    finally:
        companion.close()
    assert not os.path.exists(f"/proc/{companion.pid}")


def kill(companion: Companion) -> None:
    """Until the kernel says that it has ended."""
    with open(os.pidfd_open(companion.pid), "rb") as process:
        os.kill(companion.pid, signal.SIGKILL)
        assert select.select([process], [], [], 30)[0]


def test_a_companion_that_was_killed_has_a_successor_at_the_same_address() -> None:
    me = Process.own()
    companion = Companion("127.0.0.1", KEY, 7, me.pid, me.born)
    try:
        first, address = companion.pid, companion.address
        companion.revive()
        assert (companion.pid, companion.has_ended) == (first, False), "it is well"
        kill(companion)
        assert companion.has_ended
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(20)
            asking.sendto(question(KEY, 7, b"n" * 16), address)
            companion.revive()
            said = asking.recv(100)
            assert read_answer(KEY, said) == (7, b"n" * 16, Condition.RUNS), "asked meanwhile"
        assert companion.address == address
        assert companion.pid != first
        assert not companion.has_ended
    finally:
        companion.close()
    assert not os.path.exists(f"/proc/{companion.pid}")


def test_a_companion_that_was_dismissed_has_no_successor() -> None:
    me = Process.own()
    before = descriptors()
    companion = Companion("127.0.0.1", KEY, 7, me.pid, me.born)
    last = companion.pid
    companion.close()
    assert not companion.has_ended
    companion.revive()
    assert companion.pid == last
    assert descriptors() <= before  # What other tests left may be collected meanwhile.


def test_a_companion_for_which_there_is_no_process_is_started_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = Process.own()
    companion = Companion("127.0.0.1", KEY, 7, me.pid, me.born)

    def no_process(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    try:
        kill(companion)
        with monkeypatch.context() as patch:
            patch.setattr(pulse.subprocess, "Popen", no_process)
            with pytest.raises(BlockingIOError):
                companion.revive()
            assert companion.has_ended
        companion.revive()
        assert ask(companion, question(KEY, 7, b"n" * 16)) is not None
    finally:
        companion.close()


LONELY = """
import os, signal, sys
sys.path.insert(0, {src!r})
from telegrad.rpc.pulse import Companion
from telegrad.rpc.vitals import Process
me = Process.own()
companion = Companion("127.0.0.1", b"k" * 32, 7, me.pid, me.born)
print(companion.pid, companion.address[1], flush=True)
sys.stdin.read()
"""


def test_a_companion_tells_that_its_worker_is_stopped_and_ends_with_it() -> None:
    src = os.path.dirname(
        os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["telegrad"].__file__ or "")))
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", LONELY.format(src=src)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        pid, port = map(int, worker.stdout.readline().split())
        conditions = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(20)
            for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT):
                worker.send_signal(number)
                while True:
                    asking.sendto(question(KEY, 7, b"n" * 16), ("127.0.0.1", port))
                    said = read_answer(KEY, asking.recv(100))
                    assert said is not None
                    if said[2] is (
                        Condition.STOPPED if number == signal.SIGSTOP else Condition.RUNS
                    ):
                        break
                conditions.append(said[2])
        assert conditions == [Condition.RUNS, Condition.STOPPED, Condition.RUNS]
    finally:
        worker.kill()
        worker.communicate()
    descriptor = os.pidfd_open(pid) if os.path.exists(f"/proc/{pid}") else None
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(30_000), "the companion outlived its worker"
        os.close(descriptor)


def test_who_listens_while_its_worker_leaves_comes_to_an_end() -> None:
    """A socket that was closed has an error for each look."""
    heartbeat = Heartbeat(b"k" * 32, 1.0, 0.1, 0.1, lambda silence: None)
    asking = heartbeat._socket(socket.AF_INET)
    listening = threading.Thread(target=heartbeat._listen, daemon=True)
    asking.close()
    listening.start()
    listening.join(30)
    assert not listening.is_alive()


def test_a_companion_that_has_no_room_to_look_does_not_take_its_worker_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = Process.own()
    assert look_at(me.pid, me.born) is Condition.RUNS

    def no_room(path: str) -> None:
        raise OSError(errno.ENFILE, "Too many open files in system", path)

    monkeypatch.setattr(pulse, "open", no_room, raising=False)
    assert look_at(me.pid, me.born) is Condition.RUNS


def test_an_inquiry_comes_to_a_verdict_whatever_one_who_is_asked_answers() -> None:
    def fails(pending: object) -> None:
        raise KeyError("an error of another worker")

    lookout = object.__new__(Lookout)
    lookout._node = SimpleNamespace(wait=fails)  # type: ignore[assignment]
    pending: Any = None
    assert lookout._says_yes(pending) is False
