"""Messages that are small and well formed, and made to cost much or to reach too far."""

from __future__ import annotations

import struct
import time
import tracemalloc
from typing import Any

import pytest
import torch

from telegrad.wire import tensors
from telegrad.wire.codec import CodecError, Limits, Trust, extend, pack, unpack
from telegrad.wire.errors import Unpackable
from telegrad.wire.layouts import layout_of
from telegrad.wire.tags import Tag
from tests.wire.codec_samples import Pairing, Record, Rights

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


def doubled(make: Any, first: Any) -> Any:
    for _ in range(LEVELS):
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
