"""Requests that name a value, written as bytes: what training consists of.

To fetch a value; to call a method of it, with tensors and loans for arguments; to refer to what
such a call will return. They travel as parcels instead of trees of tuples. Any other call of a
method is the operation "invoke", and any other making of a value "create", which mean the same.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from torch import Tensor

from telegrad.rpc.loans import Loan
from telegrad.rpc.reference_messages import ForkId, ReferenceId, Transfer
from telegrad.wire.codec import Packed, pack
from telegrad.wire.parcel import Parcel

FETCH = "fetch"
METHOD = "method"
CREATE_BY_METHOD = "create_by_method"

_REFERENCE = struct.Struct("<3Q")
_TRANSFER = struct.Struct("<5Q")
_LOAN = struct.Struct("<B3Q")
"""The place among the arguments, and the value."""
_MOST_PLACES = 255
_TENSORS = {Tensor}
_PLAIN = {Tensor, Loan}
_MOST_METHODS = 1 << 10
"""So many methods of values are remembered as they are written, and as they are read: those of
modules and optimizers are called again and again."""
_LONGEST_METHOD = 1 << 7
"""Bytes: what others send may be longer, and is not remembered."""

MethodCall = tuple[ReferenceId, str, tuple[Any, ...]]
"""A call of a method of a value, without keywords: the value, the method's name, the arguments."""


def fetch_parcel(reference: ReferenceId) -> Parcel:
    return Parcel(FETCH, _REFERENCE.pack(*reference), ())


def read_fetch(parcel: Any) -> ReferenceId:
    """What is to be fetched. Raises `ValueError` if that is not said."""
    if type(parcel) is not Parcel or len(parcel.data) != _REFERENCE.size:
        raise ValueError("a request for a value that names none")
    return ReferenceId(*_REFERENCE.unpack(parcel.data))


def call_parcel(
    reference: ReferenceId, name: str, args: tuple[Any, ...], created: Transfer | None = None
) -> Parcel | None:
    """The call of a method as a parcel, if it is of that kind; its result is to be `created`."""
    kinds = {*map(type, args)}
    if not kinds <= _PLAIN or len(args) > _MOST_PLACES:
        return None
    if kinds <= _TENSORS:
        data, tensors = _write_method(reference, name), args
    else:
        lent = [(at, each.reference) for at, each in enumerate(args) if type(each) is Loan]
        loans = bytes((len(lent),)) + b"".join([_LOAN.pack(at, *each) for at, each in lent])
        data = b"".join((_REFERENCE.pack(*reference), loans, name.encode()))
        tensors = tuple([each for each in args if type(each) is Tensor])
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        return None  # The two would arrive as different tensors.
    if created is None:
        return Parcel(METHOD, data, tensors)
    return Parcel(
        CREATE_BY_METHOD, _TRANSFER.pack(*created.reference, *created.fork) + data, tensors
    )


@lru_cache(_MOST_METHODS)
def call_without_arguments(reference: ReferenceId, name: str) -> Packed:
    """The whole message: it is the same each time."""
    return pack(Parcel(METHOD, _write_method(reference, name), ()))


@lru_cache(_MOST_METHODS)
def _write_method(reference: ReferenceId, name: str) -> bytes:
    """A call that is lent nothing."""
    return b"".join((_REFERENCE.pack(*reference), b"\0", name.encode()))


@lru_cache(_MOST_METHODS)
def _read_method(data: bytes) -> tuple[ReferenceId, str]:
    """As `_write_method` wrote it."""
    return ReferenceId(*_REFERENCE.unpack_from(data)), data[_REFERENCE.size + 1 :].decode()


def read_call(parcel: Any, start: int = 0) -> MethodCall:
    """The call that a parcel asks for. Raises `ValueError` if it is none."""
    if type(parcel) is not Parcel or len(parcel.data) <= start + _REFERENCE.size:
        raise ValueError("a call of a method that names no value")
    data, args = parcel.data[start:], tuple(parcel.tensors)
    count = data[_REFERENCE.size]
    if not count and len(data) <= _LONGEST_METHOD:
        return *_read_method(data), args
    at = _REFERENCE.size + 1
    if count:
        args = _with_loans(args, data, at, count)
        at += count * _LOAN.size
    return ReferenceId(*_REFERENCE.unpack_from(data)), data[at:].decode(), args


def _with_loans(tensors: tuple[Any, ...], data: bytes, at: int, count: int) -> tuple[Any, ...]:
    """The arguments of a call some of which are lent: `count` of them are named from `at` on."""
    if len(data) < at + count * _LOAN.size:
        raise ValueError("a call of a method whose loans are missing")
    args = list(tensors)
    for place, *named in _LOAN.iter_unpack(data[at : at + count * _LOAN.size]):
        args.insert(place, Loan(ReferenceId(*named)))
    return tuple(args)


def read_creation(parcel: Any) -> tuple[Transfer, MethodCall]:
    """As `read_call`, with the name of what the call is to make."""
    if type(parcel) is not Parcel or len(parcel.data) < _TRANSFER.size:
        raise ValueError("a value is to be made that has no name")
    numbers = _TRANSFER.unpack_from(parcel.data)
    created = Transfer(ReferenceId(*numbers[:3]), ForkId(*numbers[3:]))
    return created, read_call(parcel, _TRANSFER.size)
