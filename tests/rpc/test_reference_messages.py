"""The words of the reference protocol as bytes."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from telegrad.rpc.reference_mail import together
from telegrad.rpc.reference_messages import (
    Accepted,
    Fence,
    Fenced,
    ForkId,
    Gone,
    Message,
    ReferenceId,
    Register,
    Release,
    Transfer,
    Unpin,
    read_messages,
    write_message,
)

numbers = st.integers(0, (1 << 64) - 1)
workers = st.integers(0, (1 << 16) - 1)
forks = st.builds(ForkId, numbers, numbers)
transfers = st.builds(Transfer, st.builds(ReferenceId, numbers, numbers, numbers), forks)
messages = st.one_of(
    st.builds(Register, transfers, numbers),
    st.builds(Accepted, forks),
    st.builds(Unpin, forks),
    st.builds(Release, transfers),
    st.builds(Fence, st.lists(workers, unique=True).map(tuple)),
    st.builds(Fenced, numbers),
    st.builds(Gone, forks, st.text(st.characters(exclude_categories=["Cs"]), max_size=40)),
)


@given(st.lists(messages))
def test_what_is_written_is_read(said: list[Message]) -> None:
    heard = list(read_messages(b"".join(map(write_message, said))))
    assert list(map(_comparable, heard)) == list(map(_comparable, said))


def _comparable(message: Message) -> object:
    return set(message.lost) if isinstance(message, Fence) else message


def test_a_fence_ends_what_leaves_together() -> None:
    waiting: list[Message] = [Fenced(1), Fence((1,)), Fence((2,)), *[Fenced(2)] * 5]
    assert together(waiting, 3) == [Fenced(1), Fence((1,))]
    assert together(waiting[2:], 3) == [Fence((2,))]
    assert together(waiting[3:], 3) == [Fenced(2)] * 3
    assert together([], 3) == []


@given(st.binary(max_size=80))
def test_other_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        list(read_messages(data))


@given(messages, st.data())
def test_a_message_that_is_cut_short_is_refused(said: Message, data: st.DataObject) -> None:
    whole = write_message(said)
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    try:
        list(read_messages(cut))
    except ValueError:
        return
    raise AssertionError("a part of a message was taken for a whole one")
