"""Sessions: exactly once, in order, across broken connections, in bounded memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from telegrad.wire.session import Session, SessionError


def send(session: Session[str], frame: str, nbytes: int = 1) -> tuple[int, int]:
    seq, ack = session.stamp()
    session.keep(seq, frame, nbytes)
    return seq, ack


def test_frames_are_numbered_from_one_and_carry_the_last_number_seen():
    session: Session[str] = Session()
    assert session.stamp() == (1, 0)
    assert session.accept(1)
    assert session.accept(2)
    assert session.stamp() == (2, 2)


def test_a_double_is_told_apart_and_a_gap_is_an_error():
    session: Session[str] = Session()
    assert session.accept(1)
    assert session.accept(2)
    assert not session.accept(1)
    assert not session.accept(2)
    with pytest.raises(SessionError, match="frame 4 arrived after frame 2"):
        session.accept(4)
    assert session.accept(3)


@pytest.mark.parametrize("seq", [0, -1])
def test_numbers_of_no_frame_are_refused(seq: int):
    with pytest.raises(SessionError):
        Session[str]().accept(seq)


def test_an_acknowledgement_forgets_what_it_covers_and_an_old_one_nothing():
    session: Session[str] = Session()
    for frame in "abcd":
        send(session, frame, nbytes=10)
    session.acknowledged(3)
    assert list(session.unacknowledged()) == ["d"]
    session.acknowledged(1)
    assert (session.kept_frames, session.kept_bytes) == (1, 10)
    session.acknowledged(4)
    assert (session.kept_frames, session.kept_bytes) == (0, 0)


def test_an_acknowledgement_of_what_was_never_sent_is_an_error_and_forgets_nothing():
    session: Session[str] = Session()
    send(session, "a")
    with pytest.raises(SessionError, match="only 1 were sent"):
        session.acknowledged(2)
    assert list(session.unacknowledged()) == ["a"]


def test_resume_leaves_exactly_what_the_peer_has_not_seen():
    session: Session[str] = Session()
    for frame in "abcd":
        send(session, frame)
    session.acknowledged(1)
    session.resume(3)
    assert list(session.unacknowledged()) == ["d"]


@pytest.mark.parametrize("position", [1, 5, 99, -1])
def test_resume_refuses_a_position_outside_of_what_is_kept(position: int):
    session: Session[str] = Session()
    for frame in "abcd":
        send(session, frame)
    session.acknowledged(2)
    with pytest.raises(SessionError, match="only positions 2 to 4"):
        session.resume(position)
    assert list(session.unacknowledged()) == ["c", "d"]


def test_resume_of_a_session_with_nothing_kept_wants_the_exact_position():
    session: Session[str] = Session()
    session.resume(0)
    send(session, "a")
    session.acknowledged(1)
    session.resume(1)
    with pytest.raises(SessionError):
        session.resume(0)


def test_every_acknowledgement_that_leaves_settles_what_is_owed():
    session: Session[str] = Session()
    session.accept(1, 100)
    session.accept(2, 50)
    session.accept(2, 50)
    assert session.owes_ack() == (2, 150)
    session.stamp()
    assert session.owes_ack() == (0, 0)
    session.accept(3, 7)
    assert session.acknowledge() == 3
    assert session.owes_ack() == (0, 0)
    session.accept(4, 7)
    session.resume(1)
    assert session.owes_ack() == (0, 0), "the handshake has told the peer"


def test_a_frame_is_not_kept_when_one_before_it_was_not():
    session: Session[str] = Session()
    session.stamp()
    second, _ = session.stamp()
    with pytest.raises(SessionError, match="out of order"):
        session.keep(second, "b", 1)


def test_resume_refuses_to_skip_a_frame_that_was_stamped_but_not_kept():
    session: Session[str] = Session()
    send(session, "a")
    session.stamp()
    with pytest.raises(SessionError, match="only positions 2 to 2"):
        session.resume(1)
    session.resume(2)


ACK_AFTER = 8
WINDOW = 32


class End:
    """One worker at an end of the link: sends 0, 1, 2 ... and records what it is given."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.session: Session[tuple[int, int, int]] = Session()
        self.wire: deque[tuple[int, int, int]] = deque()
        self.produced = 0
        self.received: list[int] = []

    def produce(self) -> None:
        if self.session.kept_frames >= WINDOW:
            return
        seq, ack = self.session.stamp()
        frame = (seq, ack, self.produced)
        self.produced += 1
        self.session.keep(seq, frame, 10)
        self.wire.append(frame)

    def take(self, frame: tuple[int, int, int]) -> None:
        seq, ack, payload = frame
        self.session.acknowledged(ack)
        if seq and self.session.accept(seq, 10):
            self.received.append(payload)
        if self.session.owes_ack()[0] >= ACK_AFTER or self.rng.random() < 0.1:
            self.wire.append((0, self.session.acknowledge(), -1))


def reconnect(a: End, b: End) -> None:
    """What was on the way is gone; the handshake tells both positions; both send again."""
    for end, peer in ((a, b), (b, a)):
        end.wire.clear()
        end.session.resume(peer.session.seen)
        end.wire.extend(end.session.unacknowledged())


def simulate(seed: int, steps: int = 300) -> None:
    rng = random.Random(seed)
    a, b = End(rng), End(rng)
    talkative = rng.random()
    cuts = rng.choice([0.0, 0.02, 0.2])
    for _ in range(steps):
        if rng.random() < cuts:
            # A double of what already arrived: the peer's position was read before it got there.
            late = rng.random() < 0.5 and list(a.session.unacknowledged())
            reconnect(a, b)
            if late:
                a.wire = deque(late)
        sender, peer = (a, b) if rng.random() < talkative else (b, a)
        if rng.random() < 0.5:
            sender.produce()
        elif sender.wire:
            peer.take(sender.wire.popleft())
        for end in (a, b):
            assert end.session.kept_frames <= WINDOW
            assert end.session.kept_bytes == 10 * end.session.kept_frames
    while a.wire or b.wire:
        for sender, peer in ((a, b), (b, a)):
            if sender.wire:
                peer.take(sender.wire.popleft())
    for sender, peer in ((a, b), (b, a)):
        assert peer.received == list(range(sender.produced))
        assert sender.session.kept_frames < ACK_AFTER


def run_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            simulate(seed)
        except Exception as failure:
            raise AssertionError(f"seed {seed}: simulate({seed}) replays it") from failure


def test_random_cuts_lose_nothing_double_nothing_and_keep_memory_bounded():
    run_seeds(range(500))


def accept_doubles(self: Session[str], seq: int, nbytes: int = 0) -> bool:
    self._seen = seq
    self._seen_bytes += nbytes
    return True


def forget_one_too_many(self: Session[str], ack: int) -> None:
    while self._kept and self._kept[0][0] <= ack + 1:
        self._dropped_total += self._kept.popleft()[2]


def forget_none(self: Session[str], ack: int) -> None:
    pass


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("accept", accept_doubles),
        ("acknowledged", forget_one_too_many),
        ("acknowledged", forget_none),
    ],
)
def test_the_simulation_catches_a_broken_session(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., object]
):
    monkeypatch.setattr(Session, method, broken)
    with pytest.raises(AssertionError):
        run_seeds(range(200))
