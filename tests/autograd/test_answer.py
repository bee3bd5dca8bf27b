"""The answer to the initiator of a pass."""

from __future__ import annotations

from typing import Any

from telegrad.autograd.answer import Answer
from telegrad.rpc.results import Later


def test_an_answer_that_was_given_is_the_result():
    answer = Answer(asker=0)
    answer.give(("payload",))
    assert answer.result() == ("payload",)


def test_an_answer_that_comes_later_reaches_who_subscribed():
    answer, heard = Answer(asker=0), list[Any]()
    result = answer.result()
    assert type(result) is Later
    result.subscribe(lambda payload, error: heard.append((payload, error)))
    assert heard == []
    answer.give(("payload",))
    assert heard == [(("payload",), None)]


def test_an_answer_given_before_anyone_subscribed_is_not_lost():
    answer, heard = Answer(asker=0), list[Any]()
    result = answer.result()
    answer.give(("payload",))
    result.subscribe(lambda payload, error: heard.append(payload))
    assert heard == [("payload",)]


def test_only_the_first_answer_counts():
    answer, heard = Answer(asker=0), list[Any]()
    answer.result().subscribe(lambda payload, error: heard.append(payload))
    answer.give()
    answer.give(("late",))
    assert heard == [None]
