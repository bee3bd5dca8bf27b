"""Calls of methods whose arguments are tensors, or none: the calls that training consists of.

They travel as a parcel instead of a tree of tuples: the reference, the name of the method, and the
tensors. Any other call of a method is the operation "invoke", which means the same.
"""

from __future__ import annotations

import struct
from typing import Any

from torch import Tensor

from telegrad.rpc.reference_messages import ReferenceId
from telegrad.wire.parcel import Parcel

METHOD = "method"
_TENSORS = {Tensor}

_REFERENCE = struct.Struct("<QQQ")
_START = _REFERENCE.size


def as_parcel(reference: ReferenceId, name: str, args: tuple[Any, ...]) -> Parcel | None:
    """The call as a parcel, if it is of that kind."""
    if not {*map(type, args)} <= _TENSORS:
        return None
    if len(args) > 1 and len(set(map(id, args))) < len(args):
        return None  # The two would arrive as different tensors.
    return Parcel(METHOD, _REFERENCE.pack(*reference) + name.encode(), args)


def read_parcel(parcel: Parcel) -> tuple[ReferenceId, str]:
    """The reference and the name of the method. Raises `ValueError` if they are not there."""
    data = parcel.data
    if len(data) < _START:
        raise ValueError("a call of a method that names no value")
    return ReferenceId(*_REFERENCE.unpack_from(data)), data[_START:].decode()
