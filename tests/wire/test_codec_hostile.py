"""Whatever bytes arrive, a worker that takes data only answers with a value or `CodecError`."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.wire.codec import CodecError, Trust, pack, unpack
from tests.scripts import run_script
from tests.wire.codec_samples import Mode, Pair, Record, Ticket, exported

BASE = torch.arange(32.0)
SAMPLES: list[Any] = [
    ("mod:fn", (torch.ones(1),), {}),
    [1, -(2**70), 1.5, 2j, "text", b"bytes", bytearray(3), None, True, [1.5] * 9, [7] * 9],
    {"a": {1, 2}, (1, 2): frozenset([3]), "s": slice(1, 2), "r": range(3), "x": b"x" * 20_000},
    [exported, Record(1, [Mode.ON]), Pair(1, 2), Ticket([1]), torch.float32, torch.Size([1])],
    [BASE, BASE[3:9], BASE.view(4, 8).t(), BASE[:1].expand(4), BASE.bfloat16(), BASE[0]],
    [torch.empty(3, 4, device="meta"), torch.eye(3).to_sparse(), torch.ones(2, requires_grad=True)],
    [torch.device("cpu"), torch.strided, torch.channels_last, torch.nn.Parameter(torch.ones(2))],
]
PACKED = [pack(sample, [], Trust.DATA) for sample in SAMPLES]


def answered(meta: bytes, buffers: list[bytearray]) -> None:
    try:
        value = unpack(meta, buffers, [], Trust.DATA)
    except CodecError:
        return
    _read_everything(value)


def _read_everything(value: Any) -> None:
    """A tensor outside of its buffer shows only when it is read."""
    if isinstance(value, list | tuple):
        for item in value:
            _read_everything(item)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        value.detach().flatten()[:1000].clone()


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, list[bytearray]]:
    packed = draw(st.sampled_from(PACKED))
    meta = bytearray(packed.meta)
    buffers = [bytearray(buffer) for buffer in packed.buffers]
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(meta) - 1, 0)))
        change = draw(st.sampled_from(["set", "insert", "delete", "cut", "huge", "buffer"]))
        if change == "set" and meta:
            meta[place] = draw(st.integers(0, 255))
        elif change == "insert":
            meta[place:place] = draw(st.binary(max_size=10))
        elif change == "delete":
            del meta[place : place + draw(st.integers(1, 8))]
        elif change == "cut":
            del meta[place:]
        elif change == "huge":
            meta[place : place + 8] = draw(st.integers(2**30, 2**64 - 1)).to_bytes(8, "little")
        elif buffers:
            del draw(st.sampled_from(buffers))[draw(st.integers(0, 8)) :]
    return bytes(meta), buffers


@given(mutated())
@settings(max_examples=800, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_mutated_messages_are_read_or_refused(message: tuple[bytes, list[bytearray]]) -> None:
    answered(*message)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_read_or_refused(meta: bytes) -> None:
    answered(meta, [])
    answered(b"\0\0" + meta, [])


@pytest.mark.parametrize("packed", PACKED)
def test_every_truncation_is_refused(packed: Any) -> None:
    buffers = [bytearray(buffer) for buffer in packed.buffers]
    for end in range(len(packed.meta)):
        with pytest.raises(CodecError):
            unpack(packed.meta[:end], buffers, [], Trust.DATA)
        with pytest.raises(CodecError):
            unpack(packed.meta[:end], buffers, [], Trust.CODE)


@pytest.mark.parametrize("tag", range(256))
def test_no_announced_size_is_allocated(tag: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (2**20, 2**33, 2**62, 2**64 - 1):
        meta = bytes([0, 0, tag, 255]) + size.to_bytes(8, "little") + bytes(40)
        answered(meta, [])
        answered(bytes([255]) + size.to_bytes(8, "little") + bytes(40), [])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50 * 1024, f"tag {tag} made the process grow by {grown} KB"


def test_data_only_imports_nothing() -> None:
    name = b"tests.wire.codec_samples:exported"
    meta = pack(exported).meta.replace(name, b"antigravity:fly".ljust(len(name), b"x"))
    program = (
        "import sys\n"
        "from telegrad.wire.codec import CodecError, Trust, unpack\n"
        "before = set(sys.modules)\n"
        "try:\n"
        f"    unpack({meta!r}, [], trust=Trust.DATA)\n"
        "except CodecError as error:\n"
        "    print(set(sys.modules) - before or error)\n"
    )
    done = run_script("-c", program)
    assert "antigravity:flyxxxxxxxxxxxxxxxxxx is not exported here" in done.stdout
