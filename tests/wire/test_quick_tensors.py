"""What the short cuts read from torch's own objects is what Python would be told, or not used."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from telegrad.wire import quick
from telegrad.wire.codec import CodecError, Trust, Unpackable, pack, unpack
from telegrad.wire.layouts import CASTABLE, DTYPE_CODES
from telegrad.wire.packed import NOT_QUICK
from telegrad.wire.tags import Tag
from telegrad.wire.trust import LIMITS

pytestmark = pytest.mark.skipif(not quick.BUILT, reason="the short cuts were not compiled")

SMALL = 1 << 13
"""Bytes of a tensor that are copied sooner than described."""
SHAPES = [(), (1,), (3,), (2, 3), (1, 1, 1), (4, 1, 2), (1,) * 32, (SMALL,)]

quick_pack, quick_unpack = quick.pack, quick.unpack


@contextlib.contextmanager
def the_long_way() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "pack", lambda *_: None)
        patch.setattr(quick, "unpack", lambda *_: NOT_QUICK)
        yield


def read(meta: bytes, buffer: Any) -> Any:
    return quick_unpack(meta, [buffer], Trust.CODE, LIMITS, None)


def message(code: int, *sizes: int, flags: int = 0) -> bytes:
    record = bytes((flags, code, len(sizes))) + b"".join(n.to_bytes(8, "little") for n in sizes)
    return bytes((1, 0)) + record + bytes((Tag.TENSOR, 0))


@pytest.mark.parametrize(
    "dtype", [*sorted(CASTABLE, key=str), torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_every_dtype_is_written_and_read_as_by_the_long_way(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = torch.zeros(shape).to(dtype)
        short = quick_pack(tensor, Trust.CODE)
        assert (short is not None) == (dtype in CASTABLE), shape
        if short is None:
            continue
        with the_long_way():
            slow = pack(tensor)
            buffers = [bytearray(buffer) for buffer in slow.buffers]
            expected = unpack(slow.meta, buffers)
        assert short.meta == slow.meta
        assert [*map(bytes, short.buffers)] == [*map(bytes, slow.buffers)]
        arrived = read(short.meta, buffers[0])
        assert (arrived.dtype, arrived.shape, arrived.stride()) == (dtype, shape, tensor.stride())
        assert arrived.data_ptr() == expected.data_ptr()


def test_a_part_of_a_storage_is_sent_alone() -> None:
    whole = torch.arange(12.0)
    packed = quick_pack(whole[5:8], Trust.CODE)
    assert packed is not None
    assert bytes(packed.buffers[0]) == whole[5:8].numpy().tobytes()


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(4)
    return tensor


def odd() -> torch.Tensor:
    """Contiguous for torch, which does not look at the strides of dimensions of one."""
    tensor = torch.ones(1, 3).as_strided((1, 3), (7, 1))
    assert tensor.is_contiguous()
    return tensor


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "a subclass": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "a fake one": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    "a functional one": lambda: torch._to_functional_tensor(torch.ones(2)),
    "on no device": lambda: torch.ones(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "of mkldnn": lambda: torch.ones(2).to_mkldnn(),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "a lazy negative": lambda: torch._neg_view(torch.ones(2)),
    "a lazy imaginary part": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "a zero without memory": lambda: torch._efficientzerotensor(2),
    "empty": lambda: torch.ones(2, 0),
    "transposed": lambda: torch.ones(2, 3).t(),
    "expanded": lambda: torch.ones(1).expand(3),
    "every second": lambda: torch.ones(6)[::2],
    "odd strides": odd,
    "without its memory": lambda: elsewhere(torch.ones(3)),
    "beyond its memory": lambda: elsewhere(torch.ones(9)[1:2]),
    "of many dimensions": lambda: torch.ones((1,) * 33),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_not_plain_is_left_to_the_codec(kind: str) -> None:
    tensor = UNUSUAL[kind]()
    assert quick_pack(tensor, Trust.CODE) is None
    assert quick_pack((torch.neg, (torch.ones(2), tensor), {}), Trust.CODE) is None


def test_inside_of_transforms_nothing_is_plain() -> None:
    seen: list[Any] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(quick_pack(tensor, Trust.CODE))
        return tensor.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    torch.func.jvp(look, (torch.ones(3),), (torch.ones(3),))
    torch.func.functionalize(look)(torch.ones(3))
    with forward_ad.dual_level():
        look(torch.ones(3))
        look(forward_ad.make_dual(torch.ones(3), torch.ones(3)))
    assert seen == [None] * len(seen)
    assert len(seen) == 6
    assert quick_pack(torch.ones(3), Trust.CODE) is not None


@pytest.mark.parametrize("size", [3, SMALL])
def test_what_is_plain_is_so_in_every_mode(size: int) -> None:
    with torch.inference_mode():
        tensors = [torch.ones(size)]
    tensors.append(torch.ones(size))
    for tensor in tensors:
        with torch.device("meta"), torch.autocast("cpu"), torch.no_grad():
            packed = quick_pack(tensor, Trust.CODE)
        assert packed is not None
        assert bytes(packed.buffers[0]) == bytes(tensor.numpy().data)


def test_a_copy_that_was_put_off_is_its_own() -> None:
    tensor = torch.arange(3.0)
    lazy = torch._lazy_clone(tensor)
    packed = quick_pack((torch.add, (tensor, lazy), {}), Trust.CODE)
    assert packed is not None
    assert [*map(bytes, packed.buffers)] == [tensor.numpy().tobytes()] * 2


def test_what_arrives_is_over_its_buffer_and_can_be_written_to() -> None:
    for buffer in (bytearray(8), memoryview(bytearray(8)), np.zeros(8, np.uint8)):
        tensor = read(message(DTYPE_CODES[torch.int32], 2), buffer)
        tensor += 1
        assert bytes(buffer) == b"\1\0\0\0" * 2
        assert tensor.is_leaf
        assert not tensor.requires_grad
        assert not tensor.is_inference()
        assert tensor._version == 1
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(3)


def test_a_buffer_is_kept_for_as_long_as_its_tensor() -> None:
    buffer = bytearray(8)
    tensor = read(message(DTYPE_CODES[torch.int32], 2), buffer)
    part = tensor[1:]
    del tensor
    with pytest.raises(BufferError):
        buffer.append(1)
    del part
    buffer.append(1)
    array = np.zeros(8, np.uint8)
    gone = weakref.ref(array)
    tensor = read(message(DTYPE_CODES[torch.int32], 2), array)
    del array
    assert tensor.tolist() == [0, 0]
    assert gone() is not None
    del tensor
    assert gone() is None


def test_any_thread_may_let_go_of_what_arrived() -> None:
    """The engine of torch does, without the interpreter's lock."""
    buffers = [np.zeros(4, np.uint8) for _ in range(50)]
    gone = [weakref.ref(buffer) for buffer in buffers]
    code = DTYPE_CODES[torch.float32]
    tensors = [read(message(code, 1, flags=1), buffer) for buffer in buffers]
    buffers.clear()

    def run() -> None:
        loss = sum(tensor.clone() * tensor for tensor in tensors)
        loss.backward()
        tensors.clear()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    gc.collect()
    assert [each() for each in gone] == [None] * 50


def test_who_may_not_write_to_a_buffer_goes_the_long_way() -> None:
    meta = message(DTYPE_CODES[torch.int32], 1)
    assert read(meta, b"abcd") is NOT_QUICK
    assert read(meta, memoryview(bytearray(8))[::2]) is NOT_QUICK


@pytest.mark.parametrize(
    "sizes",
    [(0,), (-1,), (-1, -1), (3,), (1 << 62, 4), (1 << 63 - 1,), (1 << 32, 1 << 32), (2, 0), (1, 3)],
)
def test_a_tensor_that_is_not_as_long_as_its_buffer_is_not_made(sizes: tuple[int, ...]) -> None:
    numbers = [size % (1 << 64) for size in sizes]
    for code in range(256):
        meta = message(code, *numbers)
        assert read(meta, bytearray(8)) is NOT_QUICK
        assert read(meta, bytearray(0)) is NOT_QUICK


def test_only_numbers_with_a_point_require_grad() -> None:
    for dtype in CASTABLE:
        meta = message(DTYPE_CODES[dtype], 2, flags=1)
        tensor = read(meta, bytearray(2 * dtype.itemsize))
        if dtype.is_floating_point:
            assert tensor.requires_grad
            assert tensor.is_leaf
        else:
            assert tensor is NOT_QUICK


def test_inside_of_a_transform_nothing_that_requires_grad_is_made() -> None:
    meta = message(DTYPE_CODES[torch.float32], 1, flags=1)

    def look(tensor: torch.Tensor) -> torch.Tensor:
        assert read(meta, bytearray(4)) is NOT_QUICK
        with pytest.raises(CodecError, match="requires_grad_"):
            unpack(meta, [bytearray(4)])
        return tensor.sum()

    torch.func.grad(look)(torch.ones(3))


def test_a_tensor_that_is_refused_is_refused_for_the_reason_of_the_long_way() -> None:
    for make in (UNUSUAL["a functional one"], UNUSUAL["without its memory"], UNUSUAL["nested"]):
        reasons = []
        for way in (contextlib.nullcontext, the_long_way):
            with way(), pytest.raises(Unpackable) as refused:
                pack(make())
            reasons.append(str(refused.value))
        assert reasons[0] == reasons[1]


ANOTHER_TORCH = """
import torch
torch.__version__ = "1.0"
from telegrad.wire import quick
assert not quick.BUILT
from telegrad.wire import _native
"""


def test_short_cuts_for_another_torch_are_not_used() -> None:
    run = subprocess.run([sys.executable, "-c", ANOTHER_TORCH], capture_output=True, text=True)
    reason = f"compiled for torch {torch.__version__} and this is torch 1.0; install telegrad again"
    assert f"ImportError: it was {reason}" in run.stderr


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_memory_that_is_about_to_be_sent_keeps_its_size(size: int) -> None:
    tensor = torch.arange(100_000.0)
    packed = quick_pack(tensor, Trust.CODE)
    assert packed is not None
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(size)
    if size:
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(size)
    del tensor
    gc.collect()
    assert bytes(packed.buffers[0]) == torch.arange(100_000.0).numpy().tobytes()
