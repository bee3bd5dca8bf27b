"""The core of a pass: who is told, who is acknowledged, and when a part has ended."""

from __future__ import annotations

import pytest
import torch

from telegrad.autograd import nodes
from telegrad.autograd.backward import Part, Post, check_gradients, merge_ack
from telegrad.autograd.context import SendRecord
from telegrad.autograd.errors import AutogradError, BadGradient
from telegrad.autograd.messages import (
    MOST_OF_A_SEQUEL,
    TOPIC,
    Absent,
    Ack,
    Begin,
    Fail,
    Failure,
    Gradient,
    History,
    Message,
    Mode,
    Options,
    Sequel,
    decode,
    encode,
)
from telegrad.wire.parcel import Parcel

FAST = Options(mode=Mode.FAST)
FAILURE = Failure(2, "worker2", "it broke", "Traceback ...")


def part(worker: int = 1, options: Options | None = None, initiator: bool = False) -> Part:
    return Part(worker, worker if initiator else 9, options or Options(), History())


def sent(posts: list[Post]) -> list[tuple[int, type[Message]]]:
    return [(post.to, type(post.message)) for post in posts]


def test_the_first_message_that_engages_is_acknowledged_when_the_part_has_ended() -> None:
    mine = part()
    assert mine.engage(0) == []
    assert mine.report() == []
    mine.complete = True
    assert sent(mine.report()) == [(0, Ack)]
    assert mine.report() == []


def test_further_messages_that_engage_are_acknowledged_at_once() -> None:
    mine = part()
    mine.engage(0)
    assert sent(mine.engage(2)) == [(2, Ack)]
    assert sent(mine.engage(0)) == [(0, Ack)]


def test_the_initiator_acknowledges_at_once() -> None:
    assert sent(part(0, initiator=True).engage(2)) == [(2, Ack)]


def test_a_part_ends_only_when_all_that_it_engaged_is_acknowledged() -> None:
    mine = part()
    mine.engage(0)
    (post,) = mine.gradient(2, 7, [torch.ones(1)])
    assert isinstance(post.message, Gradient)
    assert post.message.engages
    mine.complete = True
    assert mine.report() == []
    mine.acknowledged()
    assert sent(mine.report()) == [(0, Ack)]


def test_a_gradient_that_overtakes_the_message_that_engages_makes_its_sender_the_parent() -> None:
    mine = part()
    mine.overtook(0)
    assert sent(mine.engage(2)) == [(2, Ack)]
    assert mine.engage(0) == []
    mine.complete = True
    assert sent(mine.report()) == [(0, Ack)]


def test_a_message_that_engages_and_comes_after_its_acknowledgement_is_absorbed() -> None:
    mine = part()
    mine.overtook(0)
    mine.complete = True
    assert sent(mine.report()) == [(0, Ack)]
    assert mine.engage(0) == []
    assert mine.report() == []


def test_the_last_gradient_for_the_parent_carries_the_acknowledgement() -> None:
    mine = part()
    mine.engage(0)
    posts = [
        post for to, n in [(0, 5), (0, 6), (2, 7)] for post in mine.gradient(to, n, [torch.ones(1)])
    ]
    mine.complete = True
    mine.acknowledged()
    merged = merge_ack(posts, mine.report())
    assert sent(merged) == [(0, Gradient), (0, Gradient), (2, Gradient)]
    carriers = [p.message.acknowledges for p in merged if isinstance(p.message, Gradient)]
    assert carriers == [False, True, False]


def test_without_a_gradient_for_the_parent_the_acknowledgement_goes_alone() -> None:
    mine = part()
    mine.engage(0)
    mine.complete = True
    assert sent(merge_ack([], mine.report())) == [(0, Ack)]


def test_only_the_first_gradient_to_a_worker_engages_it() -> None:
    mine = part()
    first, second = (mine.gradient(2, n, [torch.ones(1)])[0].message for n in (7, 8))
    assert isinstance(first, Gradient)
    assert isinstance(second, Gradient)
    assert (first.engages, second.engages) == (True, False)


@pytest.mark.parametrize("to", [0, 1, 9])
def test_a_gradient_to_parent_initiator_or_oneself_does_not_engage(to: int) -> None:
    mine = part(worker=1)
    mine.engage(0)
    (post,) = mine.gradient(to, 7, [torch.ones(1)])
    assert isinstance(post.message, Gradient)
    assert not post.message.engages


def test_partners_that_got_a_gradient_are_not_told_again() -> None:
    mine = part(0, initiator=True)
    mine.gradient(2, 7, [torch.ones(1)])
    assert sent(mine.rest([2, 3])) == [(3, Begin)]
    assert mine.rest([2, 3]) == []


def test_absences_are_said_together_and_after_the_begin() -> None:
    mine = part(0, initiator=True)
    mine.absent(2, 7)
    mine.absent(2, 8)
    begin, absent = mine.rest([2])
    assert isinstance(begin.message, Begin)
    assert absent.message == Absent((7, 8))
    mine.complete = True
    assert not mine.ended
    mine.acknowledged()
    assert mine.ended


def test_a_fast_part_says_neither_begin_nor_absent() -> None:
    mine = part(0, FAST, initiator=True)
    mine.absent(2, 7)
    assert mine.rest([2, 3]) == []


def test_a_probe_tells_everyone_and_says_what_is_absent() -> None:
    mine = part(0, FAST, initiator=True)
    mine.gradient(2, 7, [torch.ones(1)])
    mine.absent(3, 9)
    assert sent(mine.probe([2, 3])) == [(2, Begin), (3, Begin), (3, Absent)]
    assert mine.probe([2, 3]) == []


def test_a_probe_is_passed_on_even_by_a_part_that_has_ended() -> None:
    mine = part(1, FAST)
    mine.engage(0)
    mine.complete = True
    mine.report()
    assert sent(mine.begin(3, [0, 3])) == [(0, Begin)]
    assert mine.report() == []
    mine.acknowledged()
    assert sent(mine.report()) == [(3, Ack)]


def test_a_failure_is_told_to_everyone_but_who_brought_it_and_silences_the_part() -> None:
    mine = part(1)
    mine.engage(0)
    posts = mine.fail(FAILURE, [2, 3], sender=2)
    assert sent(posts) == [(0, Fail), (3, Fail), (9, Fail)]
    assert mine.fail(FAILURE, [2, 3], sender=0) == []
    assert mine.engage(3) == []
    assert mine.gradient(2, 7, [torch.ones(1)]) == []
    mine.complete = True
    assert mine.report() == []


def test_a_part_depends_on_its_partners_until_it_has_reported() -> None:
    mine = part(1)
    mine.engage(0)
    assert mine.depends_on(2, [2])
    assert mine.depends_on(0, [2])
    assert not mine.depends_on(5, [2])
    mine.complete = True
    mine.report()
    assert not mine.depends_on(2, [2])


@pytest.mark.parametrize(
    "message",
    [
        Begin(Options(True, False, Mode.FAST), History(5, (1, 2))),
        Begin(Options(False, True, Mode.SMART, Sequel(1 << 60, b"data")), History(5, (1, 2))),
        Begin(Options(sequel=Sequel(0, bytes(MOST_OF_A_SEQUEL))), History()),
        Absent((1, 2, 1 << 60)),
        Absent(tuple(range(70_000))),
        Ack(),
        Fail(FAILURE),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert decode(encode(3, 4, message)) == (3, 4, message)


def test_any_number_of_tensors_may_have_gradients_in_one_message() -> None:
    one = torch.ones(1)
    parcel = encode(3, 4, Gradient(Options(), History(), False, 5, [None, one] * 40_000))
    _, _, read = decode(parcel)
    assert isinstance(read, Gradient)
    assert read.gradients == [None, one] * 40_000


@pytest.mark.parametrize("engages", [True, False])
@pytest.mark.parametrize("gradients", [(torch.ones(2), None), (torch.ones(2),)])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(True, True, Mode.FAST),
        Options(mode=Mode.FAST, sequel=Sequel(7, b"some data")),
        Options(sequel=Sequel(7)),
    ],
)
def test_a_gradient_is_read_as_it_was_written(
    engages: bool, options: Options, gradients: tuple[torch.Tensor | None, ...]
) -> None:
    _, _, read = decode(encode(3, 4, Gradient(options, History(9), engages, 5, gradients)))
    assert isinstance(read, Gradient)
    assert (read.options, read.history, read.engages, read.message) == (
        options,
        History(9),
        engages,
        5,
    )
    assert read.gradients[0] is gradients[0]
    assert len(read.gradients) == len(gradients)


FOLLOWED = encode(3, 4, Begin(Options(sequel=Sequel(7, b"data")), History())).data


@pytest.mark.parametrize("size", range(len(FOLLOWED) - 16, len(FOLLOWED)))
def test_a_sequel_that_is_cut_off_is_refused(size: int) -> None:
    with pytest.raises(AutogradError, match=r"cannot be read|less of its sequel than it says"):
        decode(Parcel(TOPIC, FOLLOWED[:size], ()))


@pytest.mark.parametrize("length", [MOST_OF_A_SEQUEL + 1, (1 << 32) - 1])
def test_a_sequel_that_is_too_long_is_refused(length: int) -> None:
    head = FOLLOWED[: -len(b"data") - 4]
    with pytest.raises(AutogradError, match=f"a sequel of {length} bytes; at most"):
        decode(Parcel(TOPIC, head + length.to_bytes(4, "little") + b"data", ()))


def record_of(*tensors: torch.Tensor) -> SendRecord:
    """Message 5, to worker 2."""
    made = nodes.send(lambda: 5, 2, [tensor.requires_grad_() for tensor in tensors])
    assert made is not None
    return SendRecord(5, 2, made[1])


SENT = record_of(torch.ones(2), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("sender", "gradients", "complaint"),
    [
        (3, [None, None], "came from worker 3, which never had it"),
        (3, None, "came from worker 3, which never had it"),
        (2, [torch.ones(2)], "are 1, but 2 tensors need one"),
        (2, [torch.ones(3), None], r"has shape \(2,\), its gradient \(3,\)"),
        (2, [None, torch.ones(3)], r"is torch.float64, its gradient torch.float32"),
        (2, [torch.ones(1, 2).to_sparse_csr(), None], "has shape"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_by_name(sender, gradients, complaint) -> None:
    with pytest.raises(BadGradient, match=f"message 5, sent to worker 2, .*{complaint}"):
        check_gradients(SENT, sender, gradients)


def test_a_layout_that_does_not_travel_is_refused() -> None:
    record = record_of(torch.ones(1, 2))
    with pytest.raises(BadGradient, match="layout"):
        check_gradients(record, 2, [torch.ones(1, 2).to_sparse_csr()])


def test_gradients_that_fit_pass() -> None:
    check_gradients(SENT, 2, [torch.ones(2), None])
    check_gradients(SENT, 2, None)
    record = record_of(torch.ones(2))
    check_gradients(record, 2, [torch.ones(2).to_sparse()])
