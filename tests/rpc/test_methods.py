"""Requests that name a value, as bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.rpc.loans import Loan
from telegrad.rpc.methods import (
    call_parcel,
    fetch_parcel,
    read_call,
    read_creation,
    read_fetch,
)
from telegrad.rpc.reference_messages import ForkId, ReferenceId, Transfer
from telegrad.wire.parcel import Parcel

VALUE = ReferenceId(1, 2, (1 << 62) + 3)
CREATED = Transfer(ReferenceId(1, 0, 7), ForkId(0, 8))
x, y = torch.ones(2), torch.zeros(2)
lent, also_lent = Loan((3, 4, 5)), Loan((3, 4, 6))


def test_a_fetch_names_its_value() -> None:
    assert read_fetch(fetch_parcel(VALUE)) == VALUE


@pytest.mark.parametrize(
    "args", [(), (x,), (x, y), (lent,), (lent, x), (x, lent, y, also_lent), (also_lent, lent, x)]
)
def test_arguments_arrive_at_their_places(args: tuple[Any, ...]) -> None:
    parcel = call_parcel(VALUE, "größer", args)
    assert parcel is not None
    assert all(type(each) is torch.Tensor for each in parcel.tensors)
    reference, name, arrived = read_call(parcel)
    assert (reference, name) == (VALUE, "größer")
    for came, left in zip(arrived, args, strict=True):
        assert came is left if type(left) is torch.Tensor else came == left
    creation = call_parcel(VALUE, "größer", args, CREATED)
    assert creation is not None
    created, (reference, name, arrived) = read_creation(creation)
    assert (created, reference, name) == (CREATED, VALUE, "größer")
    assert len(arrived) == len(args)


@pytest.mark.parametrize(
    "args",
    [(1,), (None,), ([x],), (x, x), (torch.nn.Parameter(x),), (lent,) * 256],
    ids=["number", "none", "list", "twice", "subclass", "too many"],
)
def test_other_arguments_need_a_tree(args: tuple[Any, ...]) -> None:
    assert call_parcel(VALUE, "m", args) is None


LENGTHS = {read_fetch: 24, read_call: 25 + 2 * 25, read_creation: 40 + 25 + 2 * 25}
"""Bytes, of a method without a name that is given two loans."""


@pytest.mark.parametrize("read", LENGTHS, ids=lambda read: read.__name__)
def test_what_is_cut_short_or_something_else_is_refused(read: Any) -> None:
    written = {
        read_fetch: fetch_parcel(VALUE),
        read_call: call_parcel(VALUE, "", (lent, also_lent)),
        read_creation: call_parcel(VALUE, "", (lent, also_lent), CREATED),
    }
    whole = written[read]
    assert whole is not None
    assert len(whole.data) == LENGTHS[read]
    read(whole)
    for size in range(LENGTHS[read]):
        with pytest.raises(ValueError, match=r"value|loans"):
            read(Parcel(whole.topic, whole.data[:size], ()))
    for other in (None, (1, 2, 3), "x", {}):
        with pytest.raises(ValueError, match="value"):
            read(other)
