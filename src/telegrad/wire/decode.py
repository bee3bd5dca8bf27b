"""The tree, inward. Nothing in a message is believed.

- A size is compared with what is left of the message before anything is allocated for it.
- Containers nest to a limit; unknown tags and bytes behind the end are refused.
- `Trust.DATA` imports nothing and unpickles nothing: `NAMED` looks into what was exported,
  `OPAQUE` is refused, and attributes are set past all descriptors.
- A tuple met before is refused inside of what will be hashed (see `encode`), and what hashing and
  comparing may cost is bounded (see `hashing`).

Objects are numbered at the very points where the encoder numbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct, unpack_from
from typing import Any, TypeAlias

import torch

from telegrad.wire.errors import CodecError
from telegrad.wire.hashing import steps_to_fill, steps_to_hash
from telegrad.wire.layouts import DTYPES
from telegrad.wire.opaque import TreeUnpickler
from telegrad.wire.parcel import Parcel
from telegrad.wire.primitives import ByteBuffer, Reader
from telegrad.wire.tags import LAYOUTS, MEMORY_FORMATS, Tag
from telegrad.wire.trust import Limits, Trust

# Of hashing and comparing.
_STEPS = 1 << 14
_STEPS_PER_BYTE = 16

_INT = Struct("<q")
_FLOAT = Struct("<d")
_COMPLEX = Struct("<dd")


class Decoder(Reader):
    __slots__ = (
        "depth",
        "hashed",
        "limits",
        "objects",
        "pickled",
        "scope",
        "steps",
        "tensors",
        "trust",
        "unpickler",
    )

    def __init__(
        self,
        data: bytes,
        buffers: Sequence[ByteBuffer],
        scope: object,
        trust: Trust,
        limits: Limits,
    ) -> None:
        self.data = data
        self.position = 0
        self.buffers = buffers
        self.taken = 0
        self.objects: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.pickled = b""
        self.unpickler: TreeUnpickler | None = None
        self.scope = scope
        self.trust = trust
        self.limits = limits
        self.depth = 0
        self.hashed = 0
        self.steps = 0

    def value(self) -> Any:
        position = self.position
        self.position = position + 1
        return _READERS[self.data[position]](self)

    def key(self) -> Any:
        self.hashed += 1
        value = self.value()
        self.hashed -= 1
        return value

    def about_to_fill(self, keys: list[Any]) -> None:
        """Refuse what takes longer to hash and compare than a message of this length may ask for.

        The hashes of strings follow from a secret of this process: none are made to collide.
        """
        others = [key for key in keys if type(key) is not str]
        if others:
            room = _STEPS + _STEPS_PER_BYTE * len(self.data)
            self.steps += steps_to_hash(others, room - self.steps)
            self.steps += steps_to_fill(others, room - self.steps)

    def items(self) -> list[Any]:
        data, limits = self.data, self.limits
        count = data[self.position]
        # A count of one byte need not be compared: a message that is too short ends the loop.
        if count < 255 and count <= limits.items:
            self.position += 1
        else:
            count = self.count(limits.items, "elements")
        self.depth = depth = self.depth + 1
        if depth > limits.depth:
            raise _too_deep(limits)
        readers = _READERS
        items = []
        for _ in range(count):
            position = self.position
            self.position = position + 1
            items.append(readers[data[position]](self))
        self.depth = depth - 1
        return items

    def descend(self) -> None:
        self.depth += 1
        if self.depth > self.limits.depth:
            raise _too_deep(self.limits)

    def expect(self, tag: int) -> None:
        found = self.take(1)[0]
        if found != tag:
            raise CodecError(f"tag {found} where {tag} has to be")

    def numbered(self, obj: Any) -> Any:
        self.objects.append(obj)
        return obj

    def finish(self) -> None:
        """Refuse a message of which anything is left over."""
        if self.position != len(self.data):
            raise CodecError(f"{len(self.data) - self.position} bytes follow the message's end")
        if self.taken != len(self.buffers):
            raise CodecError(f"the message uses {self.taken} of its {len(self.buffers)} buffers")
        read = self.unpickler.stream.tell() if self.unpickler else 0
        # It knows this decoder, for its buffers, and remembers all that it has loaded.
        self.unpickler = None
        if read != len(self.pickled):
            raise CodecError(f"{len(self.pickled) - read} bytes follow the last pickled object")

    def rest_of_buffers(self) -> Iterator[ByteBuffer]:
        while True:
            yield self.next_buffer()


def _too_deep(limits: Limits) -> CodecError:
    return CodecError(f"the message nests deeper than {limits.depth} levels")


ReadValue: TypeAlias = Callable[[Decoder], Any]


def _byte(d: Decoder) -> int:
    position = d.position
    d.position = position + 1
    value = d.data[position]
    return value - 256 if value > 127 else value


def _int(d: Decoder) -> int:
    return int(_INT.unpack(d.take(8))[0])


def _big_int(d: Decoder) -> int:
    return int.from_bytes(d.chunk(), "little", signed=True)


def _float(d: Decoder) -> float:
    return float(_FLOAT.unpack(d.take(8))[0])


def _complex(d: Decoder) -> complex:
    return complex(*_COMPLEX.unpack(d.take(16)))


def _str(d: Decoder) -> str:
    return str(d.chunk(), "utf-8", "surrogatepass")


def _bytes(d: Decoder) -> Any:
    value = d.chunk()
    d.objects.append(value)
    return value


def _bytearray(d: Decoder) -> Any:
    return d.numbered(bytearray(d.chunk()))


def _bytes_aside(d: Decoder) -> Any:
    return d.numbered(bytes(d.next_buffer()))


def _bytearray_aside(d: Decoder) -> Any:
    buffer = d.next_buffer()
    return d.numbered(buffer if type(buffer) is bytearray else bytearray(buffer))


def _tuple(d: Decoder) -> Any:
    if d.data[d.position] == 0:
        d.position += 1
        return ()
    value = tuple(d.items())
    if not d.hashed:
        d.objects.append(value)
    return value


def _list(d: Decoder) -> list[Any]:
    value: list[Any] = []
    d.objects.append(value)
    value += d.items()
    return value


def _read_numbers(d: Decoder, code: str) -> list[Any]:
    count = d.count(d.limits.items, "numbers")
    position = d.position
    d.take(8 * count)
    value = list(unpack_from(f"<{count}{code}", d.data, position))
    d.objects.append(value)
    return value


def _floats(d: Decoder) -> list[float]:
    return _read_numbers(d, "d")


def _ints(d: Decoder) -> list[int]:
    return _read_numbers(d, "q")


def _dict(d: Decoder) -> dict[Any, Any]:
    value: dict[Any, Any] = {}
    d.objects.append(value)
    if d.data[d.position] == 0:
        d.position += 1
        return value
    count = d.count(d.limits.items, "elements")
    d.descend()
    items = [(d.key(), d.value()) for _ in range(count)]
    d.depth -= 1
    d.about_to_fill([key for key, _ in items])
    value.update(items)
    return value


def _read_elements(d: Decoder) -> list[Any]:
    d.hashed += 1
    items = d.items()
    d.hashed -= 1
    d.about_to_fill(items)
    return items


def _set(d: Decoder) -> set[Any]:
    value: set[Any] = set()
    d.objects.append(value)
    value.update(_read_elements(d))
    return value


def _frozenset(d: Decoder) -> frozenset[Any]:
    value = frozenset(_read_elements(d))
    if not d.hashed:
        d.objects.append(value)
    return value


def _slice(d: Decoder) -> slice:
    start, stop, step = d.items()
    return slice(start, stop, step)


def _range(d: Decoder) -> range:
    start, stop, step = d.items()
    return range(start, stop, step)


def _size(d: Decoder) -> torch.Size:
    return torch.Size(d.items())


def _dtype(d: Decoder) -> torch.dtype:
    return DTYPES[d.size()]


def _device(d: Decoder) -> torch.device:
    return torch.device(d.text())


def _layout(d: Decoder) -> torch.layout:
    return LAYOUTS[d.size()]


def _memory_format(d: Decoder) -> torch.memory_format:
    return MEMORY_FORMATS[d.size()]


def _again(d: Decoder) -> Any:
    value = d.objects[d.size()]
    if d.hashed and isinstance(value, tuple | frozenset):
        raise CodecError("a tuple that was met before is part of what is hashed")
    return value


def _twice(d: Decoder) -> Any:
    d.expect(Tag.TUPLE)
    d.items()
    d.expect(Tag.AGAIN)
    return _again(d)


def _tensor(d: Decoder) -> torch.Tensor:
    number = d.data[d.position]
    if number == 255:
        return d.tensors[d.size()]
    d.position += 1
    return d.tensors[number]


def _parcel(d: Decoder) -> Parcel:
    if d.depth:
        raise CodecError("a parcel came inside of another value")
    topic = d.text()
    data = d.data[d.position :]
    d.position = len(d.data)
    return Parcel(topic, data, d.tensors)


def _unknown(d: Decoder) -> Any:
    raise CodecError(f"unknown tag {d.data[d.position - 1]} at byte {d.position - 1}")


_READERS: list[ReadValue] = [_unknown] * 256


def register(readers: dict[int, ReadValue]) -> None:
    for tag, reader in readers.items():
        _READERS[tag] = reader


register(
    {
        Tag.NONE: lambda d: None,
        Tag.TRUE: lambda d: True,
        Tag.FALSE: lambda d: False,
        Tag.BYTE: _byte,
        Tag.INT: _int,
        Tag.BIG_INT: _big_int,
        Tag.FLOAT: _float,
        Tag.COMPLEX: _complex,
        Tag.STR: _str,
        Tag.BYTES: _bytes,
        Tag.BYTEARRAY: _bytearray,
        Tag.BYTES_ASIDE: _bytes_aside,
        Tag.BYTEARRAY_ASIDE: _bytearray_aside,
        Tag.TUPLE: _tuple,
        Tag.LIST: _list,
        Tag.FLOATS: _floats,
        Tag.INTS: _ints,
        Tag.DICT: _dict,
        Tag.SET: _set,
        Tag.FROZENSET: _frozenset,
        Tag.SLICE: _slice,
        Tag.RANGE: _range,
        Tag.SIZE: _size,
        Tag.DTYPE: _dtype,
        Tag.DEVICE: _device,
        Tag.LAYOUT: _layout,
        Tag.MEMORY_FORMAT: _memory_format,
        Tag.AGAIN: _again,
        Tag.TWICE: _twice,
        Tag.TENSOR: _tensor,
        Tag.PARCEL: _parcel,
    }
)
