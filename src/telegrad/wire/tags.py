"""The first byte of every value of the tree. Append only: a number once given keeps its meaning.

Plain numbers rather than an enum: to look up an enum's member takes four times as long, which
shows in the time of a call.
"""

from __future__ import annotations

import torch


class Tag:
    NONE = 0
    TRUE = 1
    FALSE = 2
    BYTE = 3  # an int of one signed byte
    INT = 4  # of eight
    BIG_INT = 5
    FLOAT = 6
    COMPLEX = 7
    STR = 8
    BYTES = 9
    BYTEARRAY = 10
    BYTES_ASIDE = 11  # in the next buffer
    BYTEARRAY_ASIDE = 12
    TUPLE = 13
    LIST = 14
    FLOATS = 15  # a list of nothing but floats
    INTS = 16
    DICT = 17
    SET = 18
    FROZENSET = 19
    SLICE = 20
    RANGE = 21
    SIZE = 22
    DTYPE = 23
    DEVICE = 24
    LAYOUT = 25
    MEMORY_FORMAT = 26
    AGAIN = 27  # an object that was met before
    TWICE = 28  # a tuple that holds itself: a value to drop, then the one to keep
    TENSOR = 29
    NAMED = 30  # a function or class
    METHOD = 31
    NAMEDTUPLE = 32
    DATACLASS = 33
    ABSENT = 34  # a field without a value
    ENUM = 35
    ENUM_VALUE = 36  # a combination of flags
    EXTENSION = 37
    OPAQUE = 38
    PARCEL = 39  # the rest of the message is bytes


# The position is the number on the wire: append only.
LAYOUTS: tuple[torch.layout, ...] = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
    torch.jagged,
)
MEMORY_FORMATS: tuple[torch.memory_format, ...] = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
