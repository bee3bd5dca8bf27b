"""Messages that are small and well formed, and made to cost much or to reach too far."""

from __future__ import annotations

import resource
import struct
import time
import tracemalloc
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch

from telegrad.wire import tensors
from telegrad.wire.codec import CodecError, Limits, Trust, extend, pack, unpack
from telegrad.wire.encode_objects import write_tree
from telegrad.wire.errors import Unpackable
from telegrad.wire.layouts import layout_of
from telegrad.wire.primitives import write_size
from telegrad.wire.tags import Tag
from tests.scripts import run_script
from tests.wire.codec_samples import Late, Noted, Pairing, Record, Rights, exported

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = pytest.mark.parametrize("trust", list(Trust))
LEVELS = 60  # 2**60 steps are more than anyone has waited for


def refused(meta: bytes, trust: Trust, match: str, buffers: Any = ()) -> None:
    started = time.process_time()
    with pytest.raises(CodecError, match=match):
        unpack(meta, [bytearray(b) for b in buffers], trust=trust)
    assert time.process_time() - started < 5


def colliding(tag: int, count: int = 50_000) -> bytes:
    """A container of complex numbers that all have the hash 0."""
    value = bytes([Tag.NONE]) if tag == Tag.DICT else b""
    keys = (
        bytes([Tag.COMPLEX]) + struct.pack("<dd", -1000003.0 * i, float(i)) + value
        for i in range(count)
    )
    return bytes([0, 0, tag, 255]) + count.to_bytes(8, "little") + b"".join(keys)


@BOTH
@pytest.mark.parametrize("tag", [Tag.DICT, Tag.SET, Tag.FROZENSET])
def test_keys_that_share_their_hash_are_refused(tag: int, trust: Trust) -> None:
    refused(colliding(tag), trust, "keys have the same hash")


@BOTH
def test_many_keys_of_any_kind_are_not_refused(trust: Trust) -> None:
    count = 5000
    for keys in (range(count), [f"{i}" for i in range(count)], [(i, i) for i in range(count)]):
        value = dict.fromkeys(keys)
        assert unpack(pack(value, None, trust).meta, [], trust=trust) == value
        assert unpack(pack(set(keys), None, trust).meta, [], trust=trust) == set(keys)


def doubled(make: Any, first: Any, levels: int = LEVELS) -> Any:
    for _ in range(levels):
        first = make(first, first)
    return first


@BOTH
@pytest.mark.parametrize("container", [Tag.DICT, Tag.SET])
def test_a_key_that_holds_itself_many_times_over_is_refused(trust: Trust, container: int) -> None:
    meta = pack([doubled(Pairing, Pairing(1)), {}], None, trust).meta
    # Object 0 is the list, 1 the class, 2 the outermost key.
    key = bytes([container, 1, Tag.AGAIN, 2]) + bytes([Tag.NONE] * (container == Tag.DICT))
    assert meta.endswith(bytes([Tag.DICT, 0]))
    refused(meta[:-2] + key, trust, "refers to the same objects too many times")


@BOTH
def test_a_key_that_shares_a_part_is_not_refused(trust: Trust) -> None:
    part = Pairing("part", (1, 2))
    value = {Pairing(part, part): 1, part: {part, (part, part)}}
    assert unpack(pack(value, None, trust).meta, [], trust=trust) == value


def with_keys(
    values: list[Any], trust: Trust, container: int = Tag.SET, before: Any = None
) -> bytes:
    """A message of values, and behind them a container in which they are keys."""
    encoder = write_tree([before, *values, {}], None, trust)
    assert encoder.out.endswith(bytes([Tag.DICT, 0]))
    end = bytearray([container, len(values)])
    for value in values:
        end.append(Tag.AGAIN)
        write_size(end, encoder.memo[id(value)])
        end += bytes([Tag.NONE] * (container == Tag.DICT))
    return bytes(2) + encoder.out[:-2] + end


def in_frozensets(level: Any, levels: int) -> Any:
    for _ in range(levels):
        level = Pairing(frozenset({level}), frozenset({level}))
    return level


FEW_LEVELS = 20  # a million steps: long enough to tell, short enough for a test that fails


@BOTH
@pytest.mark.parametrize("container", [Tag.DICT, Tag.SET, Tag.FROZENSET])
def test_keys_that_are_compared_many_times_over_are_refused(trust: Trust, container: int) -> None:
    """Frozensets remember their hash, and not what they are equal to."""
    values = [in_frozensets(Pairing(1), FEW_LEVELS) for _ in range(2)]
    meta = with_keys(values, trust, container)
    assert len(meta) < 2000
    refused(meta, trust, "refers to the same objects too many times")


@BOTH
def test_fields_that_are_compared_and_not_hashed_count(trust: Trust) -> None:
    values = [Noted(1, doubled(lambda a, b: [a, b], [], FEW_LEVELS)) for _ in range(2)]
    refused(with_keys(values, trust), trust, "refers to the same objects too many times")
    values = [Noted(1, torch.zeros(1).expand(1 << 28)) for _ in range(2)]
    meta = with_keys(values, trust)
    table = bytearray([2, 0])
    buffers: list[memoryview] = []
    for each in values:
        tensors._write_record(each.note, table, buffers)
    refused(bytes(table) + meta[2:], trust, "refers to the same objects too many times", buffers)


@BOTH
def test_sets_are_compared_by_elements_that_may_have_grown(trust: Trust) -> None:
    """They had not all of their fields when they were hashed."""
    objects, keys = [], []
    for _ in range(2):
        late = Late()
        object.__setattr__(late, "a", frozenset({late}))
        object.__setattr__(late, "b", doubled(Pairing, Pairing(1)))
        objects.append(late)
        keys.append(Pairing(late.a))
    refused(with_keys(keys, trust, before=objects), trust, "the same objects too many times")


@BOTH
def test_a_long_number_is_weighed_each_time_it_is_hashed(trust: Trust) -> None:
    encoder = write_tree([Pairing(1 << (8 << 20)), {}], None, trust)
    # Object 0 is the list, 1 the class, 2 the key.
    keys = b"".join(
        bytes([Tag.TUPLE, 2, Tag.AGAIN, 2, Tag.INT]) + struct.pack("<q", i) for i in range(5000)
    )
    end = bytes([Tag.SET, 255]) + struct.pack("<Q", 5000) + keys
    refused(bytes(2) + encoder.out[:-2] + end, trust, "refers to the same objects too many times")


@BOTH
def test_a_long_string_is_weighed_each_time_it_is_compared(trust: Trust) -> None:
    twins = [Pairing("x" * (1 << 20)) for _ in range(2)]
    encoder = write_tree([twins, {}], None, trust)
    keys = [
        bytes([Tag.TUPLE, 9, Tag.AGAIN, encoder.memo[id(twin)]])
        + b"".join(bytes([Tag.BYTE, 256 - n]) for n in numbers)
        for twin in twins
        # These all have one hash, as -1 and -2 have.
        for numbers in product((1, 2), repeat=8)
    ]
    end = bytes([Tag.SET, 255]) + struct.pack("<Q", len(keys)) + b"".join(keys)
    refused(bytes(2) + encoder.out[:-2] + end, trust, "refers to the same objects too many times")


def test_a_key_that_nests_without_end_does_not_overflow_the_stack() -> None:
    """In a process of its own, which it would end."""
    program = (
        "import struct\n"
        "from telegrad.wire.codec import CodecError, Trust, pack, unpack\n"
        "from telegrad.wire.tags import Tag\n"
        "from tests.wire.codec_samples import Pairing\n"
        "count = 300_000\n"
        "again = lambda n: bytes([Tag.AGAIN, 255]) + struct.pack('<Q', n)\n"
        "tuples = [bytes([Tag.TUPLE, 1]) + again(n) for n in range(1, count)]\n"
        "first = bytes([Tag.TUPLE, 1, Tag.NONE])\n"
        "key = pack(Pairing(None), None, Trust.DATA).meta[2:-3] + again(count) + bytes(2)\n"
        "end = key + bytes([Tag.SET, 1]) + again(count + 2)\n"
        "body = first + b''.join(tuples) + end\n"
        "head = bytes([0, 0, Tag.LIST, 255]) + struct.pack('<Q', count + 2)\n"
        "try:\n"
        "    unpack(head + body, [], trust=Trust.DATA)\n"
        "except CodecError as error:\n"
        "    print(error)\n"
    )
    assert "nests deeper than 1000 levels" in run_script("-c", program).stdout


@BOTH
def test_a_method_of_methods_without_end_is_refused(trust: Trust) -> None:
    """Python would let go of it by recursion."""
    twice = MethodType(MethodType(exported, 1), 2)
    back = unpack(pack(twice, None, trust).meta, [], trust=trust)
    assert (back.__self__, back.__func__.__self__) == (2, 1)
    meta = pack([exported, exported], None, trust).meta
    for number in range(1, 254):
        meta += bytes([Tag.METHOD, 2, Tag.AGAIN, number, Tag.BYTE, 0])
    meta = meta[:3] + bytes([255]) + struct.pack("<Q", 255) + meta[4:]
    refused(meta, trust, "bound more than 200 times")


def grid(*values: Any) -> list[Any]:
    return list(product(values, repeat=2))


HONEST = {
    "numbers of one hash": set(grid(*range(-20, 20))) | set(product((-1, -2), repeat=6)),
    "frozensets of one hash": {Pairing(frozenset({a}), b): a for a, b in grid(-1, -2, 5)},
    "notes": {Noted(a % 3, [a, {"b": {b}}]) for a, b in grid(*range(5))},
    "wide": {frozenset(grid(*range(i))): i for i in range(40)},
    "methods": {exported, MethodType(exported, 1)},
    "long": {("x" * 100_000, n): 1 << 10_000 for n in (-1, -2)},
}


def nested(levels: int) -> Any:
    value: Any = frozenset(range(1000))
    for level in range(levels):
        value = frozenset({value, level, Pairing(level, value)})
    return value


@BOTH
@pytest.mark.parametrize("value", HONEST.values(), ids=list(HONEST))
def test_keys_of_any_kind_that_share_hashes_are_not_refused(value: Any, trust: Trust) -> None:
    back = unpack(pack(value, None, trust).meta, [], trust=trust)
    if not any(isinstance(each, MethodType) for each in value):
        assert back == value


@BOTH
def test_frozensets_in_frozensets_are_not_refused(trust: Trust) -> None:
    for value in (nested(6), {nested(3): nested(4)}):
        assert unpack(pack(value, None, trust).meta, [], trust=trust) == value
    deep = frozenset(range(1000))
    for level in range(60):
        deep = frozenset({deep, level})
    assert unpack(pack({deep}, None, trust).meta, [], trust=trust) == {deep}


@BOTH
def test_flags_are_combined_by_a_number_alone(trust: Trust) -> None:
    both = Rights.READ | Rights.WRITE
    assert unpack(pack(both, None, trust).meta, [], trust=trust) is both
    # The error of an enum shows the value, and this one takes for ever to show.
    meta = pack([doubled(lambda a, b: [a, b], []), both], None, trust).meta
    assert meta.endswith(bytes([Tag.BYTE, 3]))
    refused(meta[:-2] + bytes([Tag.AGAIN, 1]), trust, "combined to a list")


def test_an_attribute_that_hides_a_method_is_refused() -> None:
    record = Record(1)
    record.extra = 5  # type: ignore[attr-defined]
    meta = pack(record, None, Trust.DATA).meta
    assert unpack(meta, [], trust=Trust.DATA).extra == 5
    refused(meta.replace(b"extra", b"total"), Trust.DATA, "'total', which is no field of Record")


class Coded:
    """An extension that was not declared to be data."""


extend("test.coded", Coded, lambda obj, _: None, lambda data, _: Coded())


def test_an_extension_takes_part_in_data_only_jobs_if_it_says_so() -> None:
    with pytest.raises(Unpackable, match="may hold code"):
        pack(Coded(), None, Trust.DATA)
    meta = pack(Coded()).meta
    assert isinstance(unpack(meta, []), Coded)
    refused(meta, Trust.DATA, r"'test\.coded' may hold code")


def with_alias(tensor: torch.Tensor, of: torch.Tensor, buffer: int) -> Any:
    """A message with a tensor, and a second one that claims the memory of one of its buffers."""
    packed = pack(tensor)
    table = bytearray()
    buffers: list[memoryview] = []
    tensors.write_table([tensor], table, buffers)
    tensors._write_position(of, layout_of(of), 0, buffer, 0, table)
    tree = bytes([Tag.TUPLE, 2, Tag.TENSOR, 0, Tag.TENSOR, 1])
    return packed._replace(meta=bytes([2, 0]) + table + tree, buffers=buffers)


@BOTH
def test_nobody_shares_the_memory_of_indices_that_were_checked(trust: Trust) -> None:
    """Else a write through the other tensor leads out of the values."""
    sparse = torch.eye(3).to_sparse()
    packed = with_alias(sparse, sparse.indices(), 0)
    refused(packed.meta, trust, "belongs to another alone", packed.buffers)
    packed = with_alias(sparse.to_sparse_csr(), torch.zeros(4, dtype=torch.int64), 0)
    refused(packed.meta, trust, "belongs to another alone", packed.buffers)


@BOTH
def test_tensors_that_share_memory_still_do(trust: Trust) -> None:
    base = torch.arange(10.0)
    packed = pack([base[:6], base[4:]], None, trust)
    a, b = unpack(packed.meta, [bytearray(x) for x in packed.buffers], trust=trust)
    a[5] = 100
    assert b[1] == 100


BAD_INDICES = {
    "beyond the end": [[0, 3], [0, 1]],
    "negative": [[0, -1], [0, 1]],
}


@pytest.mark.parametrize("indices", BAD_INDICES.values(), ids=list(BAD_INDICES))
def test_sparse_indices_outside_of_the_shape_are_refused(indices: list[list[int]]) -> None:
    bad = torch.tensor(indices)
    packed = pack(torch.sparse_coo_tensor(torch.zeros_like(bad), torch.ones(2), (3, 3)))
    values = [bad.numpy().tobytes(), *packed.buffers[1:]]
    assert bytes(packed.buffers[0]) == bytes(32)
    refused(packed.meta, Trust.DATA, "cannot be read", values)


def test_compressed_indices_that_do_not_agree_are_refused() -> None:
    packed = pack(torch.eye(3).to_sparse_csr())
    rows = torch.tensor([0, 1, 2, 1 << 40]).numpy().tobytes()
    refused(packed.meta, Trust.DATA, "cannot be read", [rows, *packed.buffers[1:]])


def test_scales_that_do_not_match_their_channels_are_refused() -> None:
    by_channel = torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.qint8
    )
    packed = pack(by_channel)
    assert packed.meta[2:4] == bytes([6 << 2, 0])  # the record's kind, then the axis
    for axis in (1, 2, 200):
        meta = packed.meta[:3] + bytes([axis]) + packed.meta[4:]
        refused(meta, Trust.DATA, "do not match its channels", packed.buffers)


def test_zero_points_outside_of_the_type_are_refused() -> None:
    packed = pack(torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.quint8))
    for scale, zero in ((0.5, 256), (0.5, -1), (0.5, 1 << 40), (float("nan"), 1)):
        meta = packed.meta[:3] + struct.pack("<dq", scale, zero) + packed.meta[19:]
        refused(meta, Trust.DATA, "no such scale or zero point", packed.buffers)


def test_zero_points_of_channels_outside_of_the_type_are_refused() -> None:
    by_channel = torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.qint8
    )
    packed = pack(by_channel)
    scales, _, numbers = packed.buffers
    refused(
        packed.meta,
        Trust.DATA,
        "no such scale or zero point",
        [scales, struct.pack("<qq", 0, 1 << 40), numbers],
    )


def table_of(head: bytes, *parts: torch.Tensor) -> tuple[bytes, list[bytearray]]:
    """A message of one composed tensor whose parts are written as they lie, expanded or not."""
    table = bytearray(head)
    buffers: list[memoryview] = []
    for part in parts:
        tensors._write_record(part, table, buffers)
    meta = bytes([1, 0]) + table + bytes([Tag.TENSOR, 0])
    return meta, [bytearray(buffer) for buffer in buffers]


COUNT = 1 << 26
BYTE, LONG = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
# The kind, whether it is coalesced or which layout it has, and the shape.
COO = bytes([3 << 2, 0, 1, 2])
CSR = bytes([4 << 2, 0, 2, 1, 2])
PER_TENSOR = bytes([5 << 2]) + struct.pack("<dq", 1.0, 0)
PER_CHANNEL = bytes([6 << 2, 0])
SCALE = torch.ones(1, dtype=torch.float64)
EXPANDED = {
    "quantized": table_of(PER_TENSOR, BYTE.expand(COUNT)),
    "in part": table_of(PER_TENSOR, torch.zeros(2, dtype=torch.uint8).expand(COUNT, 2)),
    "by channel": table_of(PER_CHANNEL, SCALE, LONG, BYTE.expand(1, COUNT)),
    "scales": table_of(PER_CHANNEL, SCALE.expand(9), LONG.expand(9), BYTE.expand(9)),
    "indices": table_of(COO, LONG.expand(1, COUNT), BYTE.expand(COUNT)),
    "values": table_of(COO, LONG.view(1, 1), BYTE.expand(1, COUNT)),
    "rows": table_of(CSR, LONG.expand(2), torch.zeros(0, dtype=torch.int64), torch.ones(0)),
    "compressed values": table_of(CSR, torch.tensor([0, 1]), LONG, BYTE.expand(1, COUNT)),
}


@BOTH
@pytest.mark.parametrize("message", EXPANDED.values(), ids=list(EXPANDED))
def test_a_part_of_a_composed_tensor_has_all_of_its_bytes(
    message: tuple[bytes, list[bytearray]], trust: Trust
) -> None:
    """Torch copies parts, and an expanded one of a byte would take what it stands for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(message[0], trust, r"part of a composed tensor stands for \d+ bytes", message[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


OF_OTHER_TYPES = {
    "indices of a byte": table_of(COO, BYTE.view(1, 1), torch.ones(1)),
    "indices of four": table_of(COO, LONG.int().view(1, 1), torch.ones(1)),
    "indices with a fraction": table_of(COO, torch.ones(1, 1), torch.ones(1)),
    "short rows": table_of(CSR, torch.tensor([0, 1]).short(), LONG.short(), torch.ones(1)),
    "half a scale": table_of(PER_CHANNEL, SCALE.half(), LONG, BYTE),
    "short zero points": table_of(PER_CHANNEL, SCALE, LONG.int(), BYTE),
    "numbers with a fraction": table_of(PER_TENSOR, torch.ones(1)),
}


@BOTH
@pytest.mark.parametrize("message", OF_OTHER_TYPES.values(), ids=list(OF_OTHER_TYPES))
def test_parts_of_composed_tensors_are_of_the_types_that_torch_has(
    message: tuple[bytes, list[bytearray]], trust: Trust
) -> None:
    """Torch would convert them, into up to eight times the memory."""
    refused(message[0], trust, r"part of a composed tensor is of torch\.\w+, where", message[1])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_stands_for_no_more_than_is_allowed(device: str) -> None:
    """Expanded dimensions cost its sender nothing, and whoever uses the tensor everything."""
    small, huge = (torch.ones(1, device=device).expand(n) for n in (4, 1 << 40))
    limits = Limits(tensor_bytes=1 << 20)
    for tensor in (small, huge):
        packed = pack(tensor, None, Trust.DATA)
        buffers = [bytearray(buffer) for buffer in packed.buffers]
        assert unpack(packed.meta, buffers, trust=Trust.DATA).shape == tensor.shape
        if tensor is huge:
            with pytest.raises(CodecError, match="stands for 4398046511104 bytes"):
                unpack(packed.meta, buffers, trust=Trust.DATA, limits=limits)
        else:
            unpack(packed.meta, buffers, trust=Trust.DATA, limits=limits)


def test_decoding_takes_little_more_memory_than_the_message() -> None:
    """The worst case is a list of empty sets: two bytes each, 216 in memory, 8 in the list."""
    worst = 0.0
    for element in ([Tag.SET, 0], [Tag.DICT, 0], [Tag.LIST, 0], [Tag.BYTEARRAY, 0], [Tag.NONE]):
        count = 10_000
        body = bytes(element) * count
        meta = bytes([0, 0, Tag.LIST, 255]) + count.to_bytes(8, "little") + body
        tracemalloc.start()
        value = unpack(meta, [], trust=Trust.DATA)
        worst = max(worst, tracemalloc.get_traced_memory()[0] / len(meta))
        tracemalloc.stop()
        del value
    assert worst < 130
