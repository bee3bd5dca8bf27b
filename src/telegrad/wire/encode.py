"""The tree, outward: a value is a tag and what the tag calls for.

Identity. Each object that has one is numbered when it is met, and is a number when it is met
again. Those that can hold themselves (lists, dicts, dataclass instances) are numbered before
their contents, the others after; the decoder numbers at the same points. All numbered objects
are kept until the message is done, since an id says something only while its object lives.

Tuples are numbered too, or nesting one in itself twice, n times over, would take 2**n values.
Inside of what will be hashed (a key of a dict, an element of a set) they are not: hashing such a
tuple on arrival would take 2**n steps, so the decoder refuses it there.

Failure is the slow path. No path is kept while descending; `Refusal` carries the culprit and
`pack` searches for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from struct import Struct
from typing import Any, TypeAlias

import torch
from torch.nn import Parameter

from telegrad.wire.errors import Refusal
from telegrad.wire.layouts import DTYPE_CODES
from telegrad.wire.opaque import TreePickler
from telegrad.wire.parcel import Parcel
from telegrad.wire.primitives import write_size, write_text
from telegrad.wire.tags import LAYOUTS, MEMORY_FORMATS, Tag
from telegrad.wire.trust import LIMITS, Trust

_BYTE_INTS = {n: bytes((Tag.BYTE, n & 0xFF)) for n in range(-128, 128)}
_SHORT_STR = [bytes((Tag.STR, size)) for size in range(255)]
_SHORT_BYTES = [bytes((Tag.BYTES, size)) for size in range(255)]
_TENSORS = [bytes((Tag.TENSOR, number)) for number in range(255)]
_EMPTY_TUPLE = bytes((Tag.TUPLE, 0))
_EMPTY_DICT = bytes((Tag.DICT, 0))
_INT = Struct("<Bq")
_FLOAT = Struct("<Bd")
_COMPLEX = Struct("<Bdd")

_ASIDE = 1 << 14
"""Bytes from this length on travel as a buffer."""
_HOMOGENEOUS = 8
"""Lists from this length on are looked at for nothing but floats or ints."""


class Encoder:
    __slots__ = (
        "buffers",
        "depth",
        "hashed",
        "kept",
        "memo",
        "numbers",
        "out",
        "pickler",
        "scope",
        "tensors",
        "trust",
    )

    def __init__(self, scope: object, trust: Trust) -> None:
        self.out = bytearray()
        self.memo: dict[int, int] = {}
        self.kept: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.buffers: list[memoryview] = []
        self.scope = scope
        self.trust = trust
        self.depth = 0
        self.hashed = 0
        self.pickler: TreePickler | None = None

    def value(self, obj: Any) -> None:
        WRITERS[type(obj)](self, obj)

    def key(self, obj: Any) -> None:
        self.hashed += 1
        self.value(obj)
        self.hashed -= 1

    def number(self, obj: object) -> None:
        self.memo[id(obj)] = len(self.memo)
        self.kept.append(obj)

    def was_met(self, obj: object) -> bool:
        """Write the number of an object that has one."""
        number = self.memo.get(id(obj))
        if number is None:
            return False
        self.out.append(Tag.AGAIN)
        write_size(self.out, number)
        return True

    def descend(self, obj: object) -> None:
        self.depth += 1
        if self.depth > LIMITS.depth:
            raise _too_deep(obj)


def _too_deep(obj: object) -> Refusal:
    return Refusal(obj, f"it is nested more than {LIMITS.depth} levels deep; flatten it")


Writer: TypeAlias = Callable[[Encoder, Any], None]


class _Writers(dict[type, Writer]):
    """Writers of exact types; the writer of any other type is `otherwise`'s to say."""

    otherwise: Callable[[type], Writer]

    def __missing__(self, cls: type) -> Writer:
        return self.otherwise(cls)


def _none(e: Encoder, obj: None) -> None:
    e.out.append(Tag.NONE)


def _bool(e: Encoder, obj: bool) -> None:
    e.out.append(Tag.TRUE if obj else Tag.FALSE)


def _int(e: Encoder, obj: int) -> None:
    short = _BYTE_INTS.get(obj)
    if short is not None:
        e.out += short
    elif -(1 << 63) <= obj < 1 << 63:
        e.out += _INT.pack(Tag.INT, obj)
    else:
        data = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        e.out.append(Tag.BIG_INT)
        write_size(e.out, len(data))
        e.out += data


def _float(e: Encoder, obj: float) -> None:
    e.out += _FLOAT.pack(Tag.FLOAT, obj)


def _complex(e: Encoder, obj: complex) -> None:
    e.out += _COMPLEX.pack(Tag.COMPLEX, obj.real, obj.imag)


def _str(e: Encoder, obj: str) -> None:
    data = obj.encode("utf-8", "surrogatepass")
    out = e.out
    if len(data) < 255:
        out += _SHORT_STR[len(data)]
    else:
        out.append(Tag.STR)
        write_size(out, len(data))
    out += data


def _bytes(e: Encoder, obj: bytes) -> None:
    memo = e.memo
    if id(obj) in memo:
        e.was_met(obj)
        return
    memo[id(obj)] = len(memo)
    e.kept.append(obj)
    size = len(obj)
    if size < 255:
        e.out += _SHORT_BYTES[size]
        e.out += obj
    else:
        _write_raw(e, obj, Tag.BYTES, Tag.BYTES_ASIDE)


def _bytearray(e: Encoder, obj: bytearray) -> None:
    if not e.was_met(obj):
        e.number(obj)
        _write_raw(e, obj, Tag.BYTEARRAY, Tag.BYTEARRAY_ASIDE)


def _write_raw(e: Encoder, obj: bytes | bytearray, inline: int, aside: int) -> None:
    if len(obj) < _ASIDE:
        e.out.append(inline)
        write_size(e.out, len(obj))
        e.out += obj
    else:
        e.out.append(aside)
        e.buffers.append(memoryview(obj))


def _tuple(e: Encoder, obj: tuple[Any, ...]) -> None:
    out = e.out
    if not obj:
        out += _EMPTY_TUPLE
        return
    if e.hashed:
        write_items(e, obj, Tag.TUPLE)
        return
    memo = e.memo
    if id(obj) in memo:
        e.was_met(obj)
        return
    start = len(out)
    write_items(e, obj, Tag.TUPLE)
    if id(obj) in memo:
        # It holds itself through a list: what was met inside is the one that others refer to.
        out.insert(start, Tag.TWICE)
        e.was_met(obj)
    else:
        memo[id(obj)] = len(memo)
        e.kept.append(obj)


def write_items(e: Encoder, obj: Any, tag: int) -> None:
    out = e.out
    out.append(tag)
    size = len(obj)
    if size < 255:
        out.append(size)
    else:
        write_size(out, size)
    e.depth = depth = e.depth + 1
    if depth > LIMITS.depth:
        raise _too_deep(obj)
    writers = WRITERS
    for item in obj:
        writers[type(item)](e, item)
    e.depth = depth - 1


def _list(e: Encoder, obj: list[Any]) -> None:
    if e.was_met(obj):
        return
    e.number(obj)
    if len(obj) >= _HOMOGENEOUS and _write_numbers(e, obj):
        return
    # A copy: another thread may append meanwhile, and the size is written first.
    write_items(e, obj.copy(), Tag.LIST)


def _write_numbers(e: Encoder, obj: list[Any]) -> bool:
    first = type(obj[0])
    if first is not float and first is not int:
        return False
    if set(map(type, obj)) != {first}:
        return False
    try:
        numbers = array("d" if first is float else "q", obj)
    except (OverflowError, TypeError):
        return False
    e.out.append(Tag.FLOATS if first is float else Tag.INTS)
    write_size(e.out, len(numbers))
    e.out += numbers.tobytes()
    return True


def _dict(e: Encoder, obj: dict[Any, Any]) -> None:
    memo = e.memo
    if id(obj) in memo:
        e.was_met(obj)
        return
    memo[id(obj)] = len(memo)
    e.kept.append(obj)
    out = e.out
    if not obj:
        out += _EMPTY_DICT
        return
    items = list(obj.items())
    out.append(Tag.DICT)
    write_size(out, len(items))
    e.descend(obj)
    for key, item in items:
        if type(key) is str:
            _str(e, key)
        else:
            e.key(key)
        WRITERS[type(item)](e, item)
    e.depth -= 1


def _set(e: Encoder, obj: set[Any]) -> None:
    if not e.was_met(obj):
        e.number(obj)
        _write_hashed(e, list(obj), Tag.SET)


def _frozenset(e: Encoder, obj: frozenset[Any]) -> None:
    if e.hashed:
        _write_hashed(e, list(obj), Tag.FROZENSET)
    elif not e.was_met(obj):
        _write_hashed(e, list(obj), Tag.FROZENSET)
        e.number(obj)


def _write_hashed(e: Encoder, items: list[Any], tag: int) -> None:
    e.hashed += 1
    write_items(e, items, tag)
    e.hashed -= 1


def _slice(e: Encoder, obj: slice) -> None:
    write_items(e, (obj.start, obj.stop, obj.step), Tag.SLICE)


def _range(e: Encoder, obj: range) -> None:
    write_items(e, (obj.start, obj.stop, obj.step), Tag.RANGE)


def _size(e: Encoder, obj: torch.Size) -> None:
    write_items(e, tuple(obj), Tag.SIZE)


def _dtype(e: Encoder, obj: torch.dtype) -> None:
    code = DTYPE_CODES.get(obj)
    if code is None:
        raise Refusal(obj, f"{obj} has no number on the wire; send its name instead")
    e.out += bytes((Tag.DTYPE, code))


def _device(e: Encoder, obj: torch.device) -> None:
    e.out.append(Tag.DEVICE)
    write_text(e.out, str(obj))


def _layout(e: Encoder, obj: torch.layout) -> None:
    _write_position(e, obj, Tag.LAYOUT, LAYOUTS)


def _memory_format(e: Encoder, obj: torch.memory_format) -> None:
    _write_position(e, obj, Tag.MEMORY_FORMAT, MEMORY_FORMATS)


def _write_position(e: Encoder, obj: Any, tag: int, known: tuple[Any, ...]) -> None:
    if obj not in known:
        raise Refusal(obj, f"{obj} has no number on the wire; send its name instead")
    e.out += bytes((tag, known.index(obj)))


def _tensor(e: Encoder, obj: torch.Tensor) -> None:
    number = e.numbers.get(id(obj))
    if number is None:
        number = e.numbers[id(obj)] = len(e.tensors)
        e.tensors.append(obj)
    if number < 255:
        e.out += _TENSORS[number]
    else:
        e.out.append(Tag.TENSOR)
        write_size(e.out, number)


def _parcel(e: Encoder, obj: Parcel) -> None:
    if e.depth:
        raise Refusal(obj, "a parcel is a message of its own; send it by itself")
    e.out.append(Tag.PARCEL)
    write_text(e.out, obj.topic)
    e.out += obj.data
    e.tensors += obj.tensors


WRITERS = _Writers(
    {
        type(None): _none,
        bool: _bool,
        int: _int,
        float: _float,
        complex: _complex,
        str: _str,
        bytes: _bytes,
        bytearray: _bytearray,
        tuple: _tuple,
        list: _list,
        dict: _dict,
        set: _set,
        frozenset: _frozenset,
        slice: _slice,
        range: _range,
        torch.Size: _size,
        torch.dtype: _dtype,
        torch.device: _device,
        torch.layout: _layout,
        torch.memory_format: _memory_format,
        torch.Tensor: _tensor,
        Parameter: _tensor,
        Parcel: _parcel,
    }
)
