"""The short cuts of `quick` are the codec's own forms: with and without them all is the same."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.wire import codec, names, quick
from telegrad.wire.codec import CodecError, Packed, Trust, pack, unpack
from telegrad.wire.layouts import DTYPE_CODES
from telegrad.wire.packed import NOT_QUICK
from telegrad.wire.parcel import Parcel
from telegrad.wire.tags import Tag
from telegrad.wire.trust import LIMITS

pytestmark = pytest.mark.skipif(not quick.BUILT, reason="the short cuts were not compiled")

SMALL = 1 << 13
"""Bytes of a tensor that are copied sooner than described."""


quick_pack, quick_unpack = quick.pack, quick.unpack


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
    monkeypatch.setattr(quick, "pack", lambda *_: None)
    monkeypatch.setattr(quick, "unpack", lambda *_: NOT_QUICK)


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
        short = quick_pack(value, Trust.CODE)
        assert short is not None
        assert short.meta == slow.meta
        assert list(map(bytes, short.buffers)) == list(map(bytes, slow.buffers))
        assert [*map(id, short.tensors)] == [*map(id, slow.tensors)]
        assert short.untracked == slow.untracked


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
            patch.setattr(quick, "unpack", lambda *_: NOT_QUICK)
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


def call_of(name: str) -> bytes:
    start = bytes((0, 0, Tag.TUPLE, 3, Tag.NAMED, len(name))) + name.encode()
    return start + bytes((Tag.TUPLE, 0, Tag.DICT, 0))


NAMES = [
    "torch:add",
    "torch:nn.Linear.forward",
    "torch.ops:aten.add",
    "torch.ops:aten.add.Tensor",
    "os.path:join",
    "os:path.join",
    "collections:OrderedDict.fromkeys",
    "torch:__name__",
    "tests.wire.test_quick:echo",
    "nowhere:x",
    "nowhere",
    "torch",
    "torch:",
    ":",
    ":x",
    "torch:nn.",
    "torch:.nn",
    "torch:nn..Linear",
    "torch:nn:Linear",
    "is_none:__class__",
    "torch:no_such_thing",
    "raises:anything",
]


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_where_it_leads_by_the_long_way(
    name: str, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ValueError("no attribute is computed")

    monkeypatch.setitem(sys.modules, "is_none", None)
    monkeypatch.setitem(sys.modules, "raises", Raises("raises"))
    found: list[Any] = []
    for look_up in (
        lambda: quick_unpack(call_of(name), [], trust, LIMITS, None)[0],
        lambda: names.object_named(name, trust),
    ):
        try:
            found.append(look_up())
        except CodecError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_a_name_stands_for_what_has_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    message = call_of("tests.wire.test_quick:echo")
    assert unpack(message, [])[0] is echo
    monkeypatch.setattr(sys.modules["tests.wire.test_quick"], "echo", print)
    assert unpack(message, [])[0] is print


def test_a_module_that_is_being_imported_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    half, made = ModuleType("half_made"), ModuleType("half_made")
    half.__spec__ = SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    half.function = None  # type: ignore[attr-defined]
    made.function = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "half_made", half)
    monkeypatch.setattr(names.importlib, "import_module", lambda _: made)
    assert unpack(call_of("half_made:function"), [])[0] is print


def test_what_arrives_is_the_same_in_inference_mode() -> None:
    packed = pack(weights().requires_grad_())
    with torch.inference_mode():
        tensor = unpack(packed.meta, buffers_of(packed))
        assert quick_unpack(packed.meta, buffers_of(packed), Trust.CODE, LIMITS, None) is NOT_QUICK
    assert tensor.requires_grad
    assert not tensor.is_inference()


@pytest.mark.parametrize("left", [0, 4])
def test_a_tensor_whose_storage_was_given_back_is_refused(left: int) -> None:
    pack(weights())
    for wrapped in (lambda tensor: tensor, lambda tensor: [tensor]):
        freed = weights()
        freed.untyped_storage().resize_(left)
        with pytest.raises(codec.Unpackable, match=f"resized to {left or 'no'} bytes"):
            pack(wrapped(freed))


WITHOUT = """
import sys
sys.modules["telegrad.wire._native"] = None
import torch
from telegrad.wire import quick
from telegrad.wire.codec import pack, unpack
assert not quick.BUILT
value = pack((torch.add, (torch.arange(3.0), torch.ones(3)), {}))
read = unpack(value.meta, [bytearray(buffer) for buffer in value.buffers])
assert read[0] is torch.add and read[1][0].tolist() == [0, 1, 2], read
print(value.meta.hex())
"""


def test_who_has_no_compiled_short_cuts_writes_and_reads_the_same() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    packed = pack((torch.add, (torch.arange(3.0), torch.ones(3)), {}))
    assert run.stdout.strip() == packed.meta.hex()


def test_no_object_is_kept_or_lost_by_short_cuts() -> None:
    """One too many or too few references to any of them shows after a thousand."""
    tensor, parcel = weights(), Parcel("a.topic", b"data", [weights()])
    objects = [tensor, parcel, parcel.tensors, echo, Parcel, Packed, NOT_QUICK]

    def use() -> None:
        for value in (*QUICK, *NOT_SO, tensor, parcel, (echo, (tensor,), {})):
            packed = pack(value)
            buffers = buffers_of(packed)
            unpack(packed.meta, buffers)
            quick_unpack(packed.meta[:-1], buffers, Trust.CODE, LIMITS, None)

    for _ in range(3):
        use()
    gc.collect()
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(1000 // len(QUICK)):
        use()
    gc.collect()
    assert [abs(sys.getrefcount(o) - b) < 20 for o, b in zip(objects, before, strict=True)] == [
        True
    ] * len(objects)


def test_a_list_that_is_changed_while_it_is_packed_is_packed_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [weights(), torch.ones(3)]
    pack(Parcel("a.topic", b"", tensors))

    class Level:
        def __ge__(self, other: object) -> bool:
            tensors.clear()
            return False

    monkeypatch.setattr(torch.autograd.forward_ad, "_current_level", Level())
    packed = quick_pack(Parcel("a.topic", b"", tensors), Trust.CODE)
    assert not tensors
    assert packed is not None
    assert len(packed.buffers) == 2


def test_buffers_that_are_taken_away_while_they_are_unpacked_are_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack((torch.add, (torch.arange(3.0), torch.ones(3)), {}))
    unpack(packed.meta, buffers_of(packed))
    buffers = buffers_of(packed)

    class Module(ModuleType):
        def __getattr__(self, name: str) -> Any:
            buffers.clear()
            return print

    monkeypatch.setitem(sys.modules, "clears", Module("clears"))
    start = packed.meta.index(bytes((Tag.TUPLE, 3, Tag.NAMED)))
    end = packed.meta.index(bytes((Tag.TUPLE, 2, Tag.TENSOR, 0)))
    name = b"clears:buffers"
    call = bytes((Tag.TUPLE, 3, Tag.NAMED, len(name))) + name
    message = packed.meta[:start] + call + packed.meta[end:]
    target, (first, second), _ = quick_unpack(message, buffers, Trust.CODE, LIMITS, None)
    assert target is print
    assert not buffers
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [1, 1, 1])


@pytest.mark.parametrize(
    ("limit", "value", "taken"),
    [
        ("dims", -1, False),
        ("dims", 0, False),
        ("dims", 1 << 64, True),
        ("tensors", 0, False),
        ("tensors", -1, False),
        ("tensors", 1 << 64, True),
        ("tensors", math.inf, True),
        ("items", 2, False),
        ("items", 1 << 64, True),
        ("depth", 1, False),
        ("meta", 20, False),
        ("meta", 1 << 64, True),
    ],
)
def test_limits_are_those_of_the_long_way(limit: str, value: Any, taken: bool) -> None:
    packed = pack((echo, (weights(),), {}))
    unpack(packed.meta, buffers_of(packed))
    limits = replace(LIMITS, **{limit: value})
    if taken:
        read = quick_unpack(packed.meta, buffers_of(packed), Trust.CODE, limits, None)
        assert shown(read) == shown((echo, (weights(),), {}))
    else:
        with pytest.raises(CodecError):
            unpack(packed.meta, buffers_of(packed), limits=limits)


def test_a_tensor_that_cannot_be_made_is_refused_as_by_the_long_way() -> None:
    dims = 65  # numpy and torch end at 64.
    record = bytes((0, DTYPE_CODES[torch.float32], dims)) + (1).to_bytes(8, "little") * dims
    message = bytes((1, 0)) + record + bytes((Tag.TENSOR, 0))
    for _ in range(2):
        with pytest.raises(CodecError, match="cannot be read"):
            unpack(message, [bytearray(4)], limits=replace(LIMITS, dims=100))


ANEW = """
import importlib, sys
import telegrad.wire.layouts
del telegrad.wire.layouts.CASTABLE
for name in ("quick", "_native"):
    del sys.modules[f"telegrad.wire.{name}"]
    delattr(telegrad.wire, name)
print(importlib.import_module("telegrad.wire.quick").BUILT)
"""


def test_short_cuts_of_another_version_are_not_used() -> None:
    run = subprocess.run([sys.executable, "-c", ANEW], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr
