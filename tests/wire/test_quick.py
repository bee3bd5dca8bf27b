"""The short cuts of `quick` are the codec's own forms: with and without them all is the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad.wire import codec
from telegrad.wire.codec import CodecError, Packed, Trust, pack, unpack
from telegrad.wire.parcel import Parcel
from telegrad.wire.quick import NOT_QUICK, SMALL, quick_pack, quick_unpack
from telegrad.wire.tags import Tag
from telegrad.wire.trust import LIMITS


def echo(*args: Any) -> Any:
    return args


def weights() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


QUICK = [
    (echo, (), {}),
    (echo, (weights(),), {}),
    (echo, (weights().requires_grad_(),), {}),
    (echo, (weights(), weights().requires_grad_()), {}),
    (torch.add, (weights(), torch.ones(3), torch.tensor(2), weights()), {}),
    weights(),
    torch.zeros(SMALL),
    torch.zeros(SMALL).requires_grad_(),
    weights().requires_grad_() * 2,
    torch.tensor(3),
    None,
    Parcel("a.topic", b"", []),
    Parcel("a.topic", bytes(range(256)), [weights()]),
    Parcel("a.topic", b"x", [weights(), torch.ones(SMALL)]),
]
SHARED = weights()
NOT_SO = [
    False,
    (echo, (SHARED, SHARED), {}),
    (echo, (SHARED[0], SHARED[1]), {}),
    (echo, (weights(), 2), {}),
    (echo, (weights(),) * 5, {}),
    ([].append, (weights(),), {}),
    (echo, (weights(),), {"more": 1}),
    (echo, [weights()], {}),
    (echo, (weights().t(),), {}),
    (echo, (torch.nn.Parameter(weights()),), {}),
    torch.zeros(0),
    torch.eye(3).to_sparse(),
    torch._neg_view(torch.ones(3)),
    torch.zeros(2, dtype=torch.float16),
    torch.zeros(2, device="meta"),
    Parcel("a.topic", b"x", [SHARED, SHARED[0]]),
    Parcel("t" * 300, b"x", []),
    Parcel("ä", b"x", []),
]


LIKE_A_CALL = [
    (echo, None, {}),
    (echo, 0, {}),
    (echo, [], {}),
    (echo, 5, {}),
    (echo, weights(), {}),
    (echo, weights(), weights()),
    (echo, (), weights()),
    (echo, (5,), {}),
]


@pytest.fixture
def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "quick_pack", lambda *_: None)
    monkeypatch.setattr(codec, "quick_unpack", lambda *_: NOT_QUICK)


def buffers_of(packed: Packed) -> list[bytearray]:
    return [bytearray(buffer) for buffer in packed.buffers]


def shown(value: Any) -> str:
    """All that can be seen of a value."""
    if isinstance(value, torch.Tensor):
        return f"{type(value)} {value.requires_grad} {value.stride()} {value!r}"
    if isinstance(value, tuple):
        return f"{type(value)} {[shown(item) for item in value]}"
    if isinstance(value, list):
        return f"{[shown(item) for item in value]}"
    return repr(value)


def outcome(meta: bytes, buffers: list[bytearray], trust: Trust = Trust.CODE) -> str:
    try:
        return shown(unpack(meta, buffers, trust=trust))
    except CodecError:
        return "refused"


def test_the_usual_messages_are_quick() -> None:
    for value in QUICK:
        pack(value)  # A layout is remembered when it is first met, on either side.
        packed = quick_pack(value, Trust.CODE)
        assert packed is not None, value
        unpack(packed.meta, buffers_of(packed))
        read = quick_unpack(packed.meta, buffers_of(packed), Trust.CODE, LIMITS, None)
        assert read is not NOT_QUICK, value


@pytest.mark.usefixtures("the_long_way")
def test_what_is_written_in_one_go_is_what_is_written_otherwise() -> None:
    for value in QUICK:
        slow = pack(value)
        quick = quick_pack(value, Trust.CODE)
        assert quick is not None
        assert quick.meta == slow.meta
        assert list(map(bytes, quick.buffers)) == list(map(bytes, slow.buffers))
        assert [*map(id, quick.tensors)] == [*map(id, slow.tensors)]


def test_all_else_is_left_to_the_codec() -> None:
    for value in NOT_SO:
        packed = pack(value)
        assert quick_pack(value, Trust.CODE) is None, value
        unpack(packed.meta, buffers_of(packed))


def test_a_small_message_does_not_change_after_it_was_packed() -> None:
    tensor = weights()
    pack(tensor)
    packed = pack(tensor)
    tensor.zero_()
    assert unpack(packed.meta, buffers_of(packed)).sum() == 15


def test_a_function_that_is_not_exported_is_refused_on_both_sides() -> None:
    with pytest.raises(codec.Unpackable, match="not exported"):
        pack((echo, (), {}), trust=Trust.DATA)
    with pytest.raises(CodecError, match="not exported"):
        unpack(pack((echo, (), {})).meta, [], trust=Trust.DATA)


def test_a_parcel_has_no_place_inside_of_others() -> None:
    parcel = Parcel("a.topic", b"x", [])
    with pytest.raises(codec.Unpackable, match="a message of its own"):
        pack([parcel])
    nested = bytes((0, 0, Tag.TUPLE, 1)) + pack(parcel).meta[2:]
    with pytest.raises(CodecError, match="inside of another"):
        unpack(nested, [])


@pytest.mark.parametrize("seed", range(3))
def test_damaged_messages_are_taken_or_refused_as_without_short_cuts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(seed)
    damaged: list[tuple[bytes, list[bytearray]]] = []
    for value in QUICK * 150:
        packed = pack(value)
        unpack(packed.meta, buffers_of(packed))
        meta, buffers = bytearray(packed.meta), buffers_of(packed)
        for _ in range(random_.randint(0, 2)):
            place = random_.randrange(len(meta))
            match random_.randrange(4):
                case 0:
                    meta[place] = random_.choice(
                        [0, 1, 2, 29, 39, 254, 255, random_.randrange(256)]
                    )
                case 1:
                    del meta[place:]
                    meta += b"\0"
                case 2:
                    meta.insert(place, random_.randrange(256))
                case 3:
                    buffers = random_.choice([[], [*buffers, bytearray(24)], [bytearray(23)]])
        damaged.append((bytes(meta), buffers))
    for trust in Trust:
        with_short_cuts = [outcome(meta, buffers, trust) for meta, buffers in damaged]
        with monkeypatch.context() as patch:
            patch.setattr(codec, "quick_unpack", lambda *_: NOT_QUICK)
            without = [outcome(meta, buffers, trust) for meta, buffers in damaged]
        assert with_short_cuts == without, f"seed {seed}"


@pytest.mark.parametrize("value", LIKE_A_CALL, ids=range(len(LIKE_A_CALL)))
def test_a_result_that_resembles_a_call_arrives_as_it_left(value: Any) -> None:
    packed = pack(value)
    assert shown(unpack(packed.meta, buffers_of(packed))) == shown(value)


def test_a_module_that_fails_when_it_is_imported_makes_its_message_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_to_import.py").write_text("raise RuntimeError('no such device')")
    name = b"fails_to_import:function"
    call = bytes((0, 0, Tag.TUPLE, 3, Tag.NAMED, len(name))) + name
    call += bytes((Tag.TUPLE, 0, Tag.DICT, 0))
    with pytest.raises(CodecError, match=r"cannot be looked up .* RuntimeError: no such device"):
        unpack(call, [])


@pytest.mark.parametrize("left", [0, 4])
def test_a_tensor_whose_storage_was_given_back_is_refused(left: int) -> None:
    pack(weights())
    for wrapped in (lambda tensor: tensor, lambda tensor: [tensor]):
        freed = weights()
        freed.untyped_storage().resize_(left)
        with pytest.raises(codec.Unpackable, match=f"resized to {left or 'no'} bytes"):
            pack(wrapped(freed))
