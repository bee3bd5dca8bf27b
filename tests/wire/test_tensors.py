"""What a tensor is on arrival: its numbers, layout, kind, and whom it shares memory with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from telegrad.wire import torch_private
from telegrad.wire.codec import CodecError, Packed, Trust, Unpackable, pack, unpack
from telegrad.wire.layouts import DTYPES

DENSE = [dtype for dtype in DTYPES.values() if not str(dtype).startswith("torch.q")]


def arrived(packed: Packed) -> Any:
    buffers = [bytearray(buffer) for buffer in packed.buffers]
    return unpack(packed.meta, buffers, trust=Trust.DATA)


def sent(obj: Any) -> Any:
    return arrived(pack(obj, trust=Trust.DATA))


def raw(tensor: torch.Tensor) -> list[int]:
    """The bits of the elements, so that NaN and types without arithmetic compare too."""
    if tensor.itemsize < 16:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensor = tensor.view(integers[tensor.itemsize])
    return list(tensor.detach().contiguous().numpy().tobytes())


def bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits; random bytes are no valid bools."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def assert_same(tensor: torch.Tensor, back: torch.Tensor) -> None:
    assert type(back) is type(tensor)
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert back.requires_grad == tensor.requires_grad
    assert back.device == tensor.device
    assert back.is_leaf
    assert raw(back) == raw(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    whole = bits(4, 6, dtype=dtype)
    for tensor in (whole, whole[0, 0], whole[:0], whole.t(), whole[1:3, 2:5], whole[2]):
        back = sent(tensor)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert raw(back) == raw(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:3, 2:4],
        lambda x: x[::2],
        lambda x: x[:1].expand(5, 6),
        lambda x: x[0, 0].expand(3, 3),
        lambda x: x.view(1, 4, 3, 2).to(memory_format=torch.channels_last),
        lambda x: x.as_strided((3, 3), (2, 1)),
        lambda x: x.as_strided((4, 1), (1, 7)),
        lambda x: x.new_empty(0, 3),
        lambda x: x.new_empty(3, 0).t(),
        lambda x: x.new_tensor(5.0),
    ],
)
def test_strides_are_kept(make: Any) -> None:
    tensor = make(bits(4, 6))
    back = sent(tensor)
    assert_same(tensor, back)
    assert back.stride() == tensor.stride()


def test_large_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.zeros(10_000)
    packed = pack(tensor)
    tensor.fill_(1)
    assert arrived(packed).sum() == 10_000
    strided = torch.zeros(20, 20).t()
    packed = pack(strided)
    strided.fill_(1)
    assert arrived(packed).sum() == 400


def test_arriving_tensors_alias_their_buffer() -> None:
    for tensor in (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2).t()):
        packed = pack(tensor)
        buffer = bytearray(packed.buffers[0])
        unpack(packed.meta, [buffer]).view(-1 if tensor.dim() == 1 else (2, 2)).fill_(1)
        assert any(buffer)


def test_packed_buffers_keep_the_memory_alive() -> None:
    packed = pack(torch.arange(100_000.0))
    (buffer,) = packed.buffers
    meta = packed.meta
    del packed
    assert unpack(meta, [bytearray(buffer)])[-1] == 99_999


def test_table_is_in_order_of_first_appearance_with_the_callers_tensors() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(2)
    packed = pack({"x": [b, a], "y": b})
    assert [id(tensor) for tensor in packed.tensors] == [id(b), id(a)]
    back = arrived(packed)
    assert back["y"] is back["x"][0]


def test_requires_grad_and_parameters() -> None:
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 2
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for tensor in (leaf, inner, torch.nn.Parameter(torch.ones(3)), frozen, inner.view(1, 2).t()):
        assert_same(tensor, sent(tensor))


def test_lazy_conjugates_negatives_and_zeros_are_settled() -> None:
    x = torch.randn(3, 2, dtype=torch.complex64)
    zero = torch._efficientzerotensor((2,))
    for tensor in (x.conj(), x.conj().imag, x.t().conj(), zero):
        for back in (sent(tensor), sent([tensor, x])[0]):
            assert torch.equal(back, tensor.clone() if tensor is zero else tensor)
            assert not back.is_conj()
            assert not back.is_neg()


def test_views_of_one_storage_share_it_on_arrival() -> None:
    base = torch.zeros(4, 4)
    views = [base, base[1], base.t(), base[2:, 1], base.view(torch.int32), base.view(-1)[3:7]]
    packed = pack(views)
    assert len(packed.buffers) == 1
    back = arrived(packed)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    back[0].copy_(torch.arange(16.0).view(4, 4))
    base.copy_(torch.arange(16.0).view(4, 4))
    for view, other in zip(views, back, strict=True):
        assert torch.equal(view, other)
        assert view.stride() == other.stride()


def test_views_of_unequal_element_sizes_begin_where_all_can() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    views = [base[32:48].view(torch.float64), base[25:60], base[26:30].view(torch.int16)]
    back = sent(views)
    assert [raw(view) for view in views] == [raw(tensor) for tensor in back]
    back[0].zero_()
    assert back[1][7] == 0


def test_tensor_that_lies_over_itself_still_does_on_arrival() -> None:
    back = sent(torch.arange(20.0).as_strided((2, 2), (9, 9)))
    back[0, 1] = 77
    assert back[1, 0] == 77


def test_neighbours_share_and_strangers_do_not() -> None:
    base = torch.arange(1_000_000.0)
    a, b = base[:10], base[10:20]
    far = base[-10:]
    packed = pack([a, b, far])
    assert sorted(len(buffer) for buffer in packed.buffers) == [40, 80]
    assert [tensor[0].item() for tensor in arrived(packed)] == [0, 10, 999_990]


def test_small_view_does_not_drag_its_storage() -> None:
    base = torch.arange(1_000_000.0).view(1000, 1000)
    for view in (base[5], base[:, 5], base[5, 5], base[:10, :10]):
        packed = pack(view)
        assert sum(map(len, packed.buffers)) == view.nbytes
        assert torch.equal(arrived(packed), view)


def test_expanded_tensor_sends_its_elements_once() -> None:
    packed = pack(torch.ones(1).expand(1000, 1000))
    assert sum(map(len, packed.buffers)) == 4
    assert arrived(packed).stride() == (0, 0)
    column = torch.ones(1000, 1000)[:, :1]
    packed = pack(column.expand(1000, 1000))
    assert sum(map(len, packed.buffers)) == 4000
    assert arrived(packed).stride() == (1, 0)


def test_meta_tensors_have_no_buffer() -> None:
    tensor = torch.empty(10**6, 10**6, device="meta").t()
    packed = pack(tensor)
    assert packed.buffers == []
    back = arrived(packed)
    assert (back.device, back.shape, back.stride()) == (tensor.device, tensor.shape, (1, 10**6))


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced: bool) -> None:
    indices = torch.tensor([[0, 0, 1], [2, 2, 0]])
    tensor = torch.sparse_coo_tensor(indices, bits(3, 2), (2, 3, 2), check_invariants=True)
    tensor = (tensor.coalesce() if coalesced else tensor).requires_grad_()
    back = sent(tensor)
    assert back.is_coalesced() == coalesced
    assert back.requires_grad
    for part, other in zip(
        torch_private.coo_parts(tensor), torch_private.coo_parts(back), strict=True
    ):
        assert raw(part) == raw(other)
    assert torch.equal(tensor.to_dense(), back.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse(layout: str) -> None:
    dense = torch.arange(16.0).view(4, 4).triu()
    block = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    tensor = getattr(dense, f"to_sparse_{layout}")(**block)
    back = sent(tensor)
    assert back.layout is tensor.layout
    assert torch.equal(back.to_dense(), dense)


ONE = torch.ones(1, dtype=torch.complex64)
PLACES = torch.tensor([[0, 2], [1, 1]])
STARTS = {torch.int64: torch.tensor([0, 1, 2]), torch.int32: torch.tensor([0, 1, 2]).int()}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.sparse_coo_tensor(PLACES, torch.ones(1).expand(2), (3, 3)),
        lambda: torch.sparse_coo_tensor(PLACES, torch.ones(1).expand(2), (3, 3)).requires_grad_(),
        lambda: torch.sparse_coo_tensor(PLACES[:, :1].expand(2, 4), torch.arange(4.0), (3, 3)),
        lambda: torch.sparse_coo_tensor(PLACES.int(), torch.ones(2, 1).expand(2, 5), (3, 3, 5)),
        lambda: torch.sparse_coo_tensor(PLACES, torch.ones(4)[::3], (3, 3)),
        lambda: torch.sparse_coo_tensor(
            PLACES, torch.rand(9999)[::9].expand(2, 1111), (3, 3, 1111)
        ),
        lambda: torch.sparse_coo_tensor(PLACES, (1j * ONE).expand(2).conj(), (3, 3)),
        lambda: torch.sparse_coo_tensor(PLACES, torch._efficientzerotensor((2,)), (3, 3)),
        lambda: torch.sparse_coo_tensor(PLACES, torch.ones(1).bfloat16().expand(2), (3, 3)),
        lambda: torch.sparse_coo_tensor(PLACES[:, :0], torch.ones(0), (3, 3)),
        lambda: torch.sparse_coo_tensor(PLACES[:0], torch.ones(1).expand(2), ()),
        lambda: torch.sparse_csr_tensor(
            STARTS[torch.int32], torch.tensor([0, 1]).int(), torch.ones(1).expand(2), (2, 2)
        ),
        lambda: torch.sparse_csc_tensor(
            STARTS[torch.int64], torch.zeros(1).long().expand(2), torch.ones(2), (2, 2)
        ),
        lambda: torch.arange(16.0).view(4, 4).to_sparse_bsr((2, 2)).t(),
        lambda: torch.ones(2, 2, 3).to_sparse_csr(dense_dim=1),
        lambda: torch.zeros(0, 3).to_sparse_csr(),
    ],
    ids=[
        *(
            "values",
            "values of a leaf",
            "indices",
            "hybrid",
            "apart",
            "far apart",
            "conjugates",
            "zeros",
        ),
        *("bfloat16", "empty", "without dimensions", "csr", "csc", "bsc", "hybrid csr", "no rows"),
    ],
)
def test_sparse_tensors_travel_with_parts_that_are_expanded_or_strided(make: Any) -> None:
    tensor = make()
    back = sent(tensor)
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()
    elif tensor.layout is torch.sparse_csr:
        assert back.crow_indices().dtype is tensor.crow_indices().dtype


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_without_memory_travel(layout: torch.layout) -> None:
    tensor = torch.empty(3, 4, layout=layout, device="meta")
    back = sent(tensor)
    assert (back.layout, back.shape, back.device) == (layout, tensor.shape, tensor.device)


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized_views(dtype: torch.dtype) -> None:
    x = torch.quantize_per_tensor(torch.randn(3, 4), 0.05, 3, dtype)
    scales, zeros = torch.tensor([0.5]).expand(3), torch.zeros(3, dtype=torch.int64)
    by_channel = torch.quantize_per_channel(torch.randn(3, 4), scales, zeros, 0, dtype)
    for tensor in (x[:1].expand(5, 4), x.t(), x[:, ::2], x[:0], by_channel, by_channel[:, :0]):
        back = sent(tensor)
        assert back.qscheme() is tensor.qscheme()
        assert torch.equal(back.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4)
    by_tensor = torch.quantize_per_tensor(x, 0.05, 3, dtype)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    by_channel = torch.quantize_per_channel(x, scales, zeros, 0, dtype)
    for tensor in (by_tensor, by_channel):
        back = sent(tensor)
        assert back.dtype is dtype
        assert back.qscheme() is tensor.qscheme()
        assert torch.equal(back.int_repr(), tensor.int_repr())
        assert torch.equal(back.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_kinds_without_a_record_are_unpackable() -> None:
    nested = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint4x2)
    with pytest.raises(Unpackable, match="dequantize"):
        pack({"q": nested})


def test_tensor_subclasses_are_pickled_with_their_class() -> None:
    buffer = torch.nn.UninitializedParameter()
    packed = pack(buffer)
    assert packed.tensors == []
    assert isinstance(unpack(packed.meta, []), torch.nn.UninitializedParameter)


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of one storage, anywhere in it, some of them expanded, some of other types."""
    base = bits(64, seed=draw(st.integers(0, 1000)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dims = draw(st.integers(0, 3))
        shape = draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
        strides = draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims))
        view = base.as_strided(shape, strides, draw(st.integers(0, 9)))
        found.append(view.view(draw(st.sampled_from([torch.float32, torch.int32]))))
    return found


@given(views())
@settings(max_examples=150, deadline=None)
def test_any_views_come_back_and_writes_show_where_they_showed(found: list[torch.Tensor]) -> None:
    back = sent(found)
    for tensor, other in zip(found, back, strict=True):
        assert_same(tensor, other)
    for index, view in enumerate(found):
        if view.numel():
            place = (0,) * view.dim()
            view.view(torch.int32)[place] = back[index].view(torch.int32)[place] = 77 + index
    for tensor, other in zip(found, back, strict=True):
        assert raw(tensor) == raw(other)


def test_buffer_of_another_length_is_refused() -> None:
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 3).t()):
        packed = pack(tensor)
        with pytest.raises(CodecError, match="buffer"):
            unpack(packed.meta, [bytearray(len(packed.buffers[0]) - 1)])
        with pytest.raises(CodecError, match="buffer"):
            unpack(packed.meta, [])
    with pytest.raises(CodecError, match="12 bytes came with a buffer of 13"):
        unpack(pack(torch.ones(3)).meta, [bytearray(13)])


def test_negative_shape_is_refused() -> None:
    meta = pack(torch.ones(3)).meta.replace((3).to_bytes(8, "little"), b"\xff" * 8)
    with pytest.raises(CodecError, match="negative"):
        unpack(meta, [bytearray(12)])


def test_shape_that_asks_for_more_than_its_buffer_is_refused() -> None:
    packed = pack(torch.ones(2, 3).t())
    for number in (4, 2**31, 2**62, 2**63 - 1):
        meta = packed.meta.replace((3).to_bytes(8, "little"), number.to_bytes(8, "little"))
        with pytest.raises(CodecError):
            unpack(meta, [bytearray(24)])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "whole",
    [
        lambda: torch.ones(1000),
        lambda: torch.ones(1000)[1:],
        lambda: torch.ones(1000, dtype=torch.bfloat16),
        lambda: torch.ones(1000, dtype=torch.complex64).conj(),
        lambda: torch.ones(1000, requires_grad=True),
        lambda: torch.ones(100, 10).t(),
        lambda: torch.ones(100, 1000)[:, 0],
        lambda: torch.quantize_per_tensor(torch.ones(1000), 1.0, 0, torch.qint8),
    ],
    ids=["whole", "offset", "bfloat16", "lazy", "leaf", "strided", "column", "quantized"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_nothing_is_read_beyond_a_storage_that_was_resized(whole: Any, shared: bool) -> None:
    tensor = whole()
    storage = tensor.untyped_storage()
    storage.resize_(40)
    message = [tensor, tensor.detach().view_as(tensor)] if shared else tensor
    with pytest.raises(Unpackable, match="resized to 40 bytes"):
        pack(message)
    assert storage.nbytes() == 40


def test_parts_of_a_sparse_tensor_are_not_read_beyond_their_storage() -> None:
    values = torch.ones(3)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (5,), check_invariants=True)
    torch_private.coo_parts(sparse)[1].untyped_storage().resize_(4)
    with pytest.raises(Unpackable, match="resized to 4 bytes"):
        pack(sparse)


def test_a_tangent_of_forward_mode_is_refused_and_not_lost() -> None:
    assert not torch_private.in_dual_level()
    with forward_ad.dual_level():
        assert torch_private.in_dual_level()
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for message in (dual, [dual], (torch.abs, (dual,), {})):
            with pytest.raises(Unpackable, match="tangent of forward-mode"):
                pack(message)
        assert pack(torch.ones(2)).tensors


def test_a_tensor_inside_of_functionalize_has_no_bytes_to_send() -> None:
    """Torch gives an address for it, at which something else is."""
    refused = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        assert torch_private.is_functional(x)
        for value in (x, [x], x[1:]):
            with pytest.raises(Unpackable, match="from outside of the transform"):
                pack(value)
            refused.append(value)
        return x.sum()

    assert not torch_private.is_functional(torch.ones(3))
    torch.func.functionalize(inside)(torch.ones(3))
    assert len(refused) == 3
