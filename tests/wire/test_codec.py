"""What the tree carries, how identity survives, and what is refused."""

from __future__ import annotations

import gc
import math
import operator
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.wire.codec import (
    LIMITS,
    CodecError,
    Limits,
    Trust,
    Unpackable,
    extend,
    pack,
    unpack,
)
from telegrad.wire.names import object_named
from telegrad.wire.opaque import TreeUnpickler
from tests.wire.codec_samples import (
    Access,
    Color,
    Frozen,
    Mode,
    Node,
    OnSlots,
    Opaque,
    Pair,
    Point,
    Record,
    Ticket,
    decorated,
    exported,
    unexported,
)


def sent(obj: Any, trust: Trust = Trust.CODE, scope: Any = None) -> Any:
    packed = pack(obj, scope, trust)
    buffers = [bytearray(buffer) for buffer in packed.buffers]
    return unpack(packed.meta, buffers, scope, trust)


def same(a: Any, b: Any) -> bool:
    """Equal down to types, the sign of zero, and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == float.hex(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(*keys) and same(a[keys[0]], b[keys[1]]) for keys in zip(a, b, strict=True)
        )
    if isinstance(a, Record):
        return same(vars(a), vars(b))
    return bool(a == b)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]), max_size=3)
    | st.binary(max_size=300)
    | st.binary(max_size=3).map(bytearray)
)
hashable = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers())
leaves = scalars | st.sets(hashable) | st.frozensets(hashable) | st.builds(slice, st.integers())
values: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        leaves
        | st.lists(values, max_size=4)
        | st.lists(values, max_size=4).map(tuple)
        | st.dictionaries(hashable, values, max_size=4)
        | st.builds(Record, values, values)
        | st.builds(Pair, values, values)
    )
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_nested_values_come_back_with_exact_types(value: Any) -> None:
    assert same(sent(value, Trust.DATA), value)


@given(st.lists(st.floats()) | st.lists(st.integers()) | st.lists(st.integers() | st.booleans()))
@settings(max_examples=100, deadline=None)
def test_lists_of_numbers_come_back_with_exact_types(numbers: list[Any]) -> None:
    numbers = numbers * 4
    assert same(sent(numbers, Trust.DATA), numbers)


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 70_000])
def test_sizes_around_their_encodings(count: int) -> None:
    for value in ("x" * count, b"x" * count, bytearray(count), [None] * count, (1.5,) * count):
        assert same(sent(value), value)
    assert sent({i: i for i in range(count)}) == {i: i for i in range(count)}


def test_long_bytes_travel_as_buffers() -> None:
    value = [b"a" * 100_000, bytearray(b"b" * 100_000)]
    packed = pack(value)
    assert len(packed.meta) < 100
    assert [len(buffer) for buffer in packed.buffers] == [100_000, 100_000]
    assert same(sent(value), value)


@pytest.mark.parametrize(
    "value",
    [
        range(2, 10**30, 3),
        slice(None, (1, 2), -1),
        torch.Size([2, 3]),
        torch.float8_e5m2,
        torch.quint8,
        torch.device("cuda:1"),
        torch.device("cpu"),
        torch.sparse_csr,
        torch.channels_last,
        Point(1, [2]),
        Frozen(1, (2,)),
        Color.BLUE,
        Access.READ | Access.WRITE,
        Access(0),
        OrderedDict(a=1),
        np.float32(2.5),
        2**63,
        -(2**63) - 1,
    ],
    ids=repr,
)
def test_value_comes_back_equal(value: Any) -> None:
    back = sent(value)
    assert type(back) is type(value)
    assert back == value


def _name_of(function: Any) -> str:
    """An id without an address: the processes of a parallel run must agree on it."""
    return str(getattr(function, "__qualname__", function))


@pytest.mark.parametrize(
    "function",
    [
        torch.add,
        torch.nn.functional.relu,
        torch.nn.functional.max_pool2d,
        torch.nn.functional.gelu,
        torch.linalg.norm,
        torch.Tensor.add,
        torch.Tensor.backward,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add,
        torch.nn.Linear,
        len,
        operator.add,
        math.sin,
        str.upper,
        int.__add__,
        Opaque,
        Opaque.method,
        decorated,
        exported,
        int,
        type,
        type(None),
        types.FunctionType,
    ],
    ids=_name_of,
)
def test_function_or_class_travels_by_name(function: Any) -> None:
    assert sent(function) is function


@pytest.mark.parametrize("method", [dict.fromkeys, Opaque.made], ids=_name_of)
def test_class_method_travels_by_name(method: Any) -> None:
    assert sent(method) == method


def test_bound_method_travels_with_its_self() -> None:
    obj = Opaque(a=1)
    method, same_obj = sent((obj.method, obj))
    assert method(3) == ("method", 3)
    assert method.__self__ is same_obj
    appended: list[int] = []
    back, append = sent((appended, appended.append))
    append(1)
    assert back == [1]


def test_object_met_twice_is_one_object() -> None:
    shared: Any = [{}, [], Node("n"), Opaque(), set(), bytearray(b"x"), (1, []), torch.ones(2)]
    first, second = sent((shared, list(shared)))
    assert len(first) == len(shared)
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_equal_objects_stay_apart() -> None:
    a, b = sent(([], []))
    assert a is not b


def test_objects_that_hold_themselves() -> None:
    loop: list[Any] = []
    table = {"loop": loop}
    node = Node("n", [loop])
    loop += [loop, table, node]
    node.links.append(node)
    back = sent(loop)
    assert back[0] is back
    assert back[1]["loop"] is back
    assert back[2].links[0] is back
    assert back[2].links[1] is back[2]


def test_tuple_that_holds_itself_through_a_list() -> None:
    inner: list[Any] = []
    value = (inner, 1)
    inner.append(value)
    back, after = sent((value, inner))
    assert back[0][0] is back
    assert after is back[0]


def test_tuple_nested_in_itself_many_times_takes_little_space() -> None:
    value: Any = ("leaf",)
    for _ in range(60):
        value = (value, value)
    packed = pack(value)
    assert len(packed.meta) < 1000
    back = unpack(packed.meta, [])
    assert back[0] is back[1]


def test_tuple_met_before_is_refused_where_it_would_be_hashed() -> None:
    pair = (1, 2)
    back = sent([pair, {pair: pair, (pair, pair): 0}, {pair}, frozenset([pair])])
    assert back == [pair, {pair: pair, (pair, pair): 0}, {pair}, frozenset([pair])]
    # [(None,), {again 1}]: what this decoder never writes into a set.
    meta = bytes([0, 0, 14, 2, 13, 1, 0, 18, 1, 27, 1])
    with pytest.raises(CodecError, match="hashed"):
        unpack(meta, [])


def test_dataclass_keeps_absent_fields_and_further_attributes() -> None:
    node = Node("n")
    node.extra = {"x": 1}  # type: ignore[attr-defined]
    back = sent(node)
    assert not hasattr(back, "cache")
    assert back.extra == {"x": 1}


def test_extension_is_reduced_once_and_told_its_scope() -> None:
    scope: list[Any] = []
    ticket = Ticket(7)
    a, b = sent([ticket, ticket], scope=scope)
    assert a is b
    assert scope == [("leaves", 7), ("arrives", 7)]


def test_extensions_and_tensors_inside_of_opaque_objects() -> None:
    scope: list[Any] = []
    tensor, ticket, table = torch.arange(1000.0), Ticket([1]), {"t": 1}
    obj = Opaque(tensor=tensor, ticket=ticket, table=table, inner=Opaque(ticket=ticket))
    packed = pack([table, tensor, obj, ticket], scope)
    assert packed.tensors == [tensor]
    assert len(packed.meta) < 500
    table2, tensor2, obj2, ticket2 = unpack(packed.meta, [bytearray(packed.buffers[0])], scope)
    assert obj2.tensor is tensor2
    assert obj2.ticket is obj2.inner.ticket is ticket2
    assert obj2.table is table2
    assert scope == [("leaves", [1]), ("arrives", [1])]


def test_opaque_objects_share_what_they_hold() -> None:
    shared = Opaque(n=1)
    a, b = sent([Opaque(s=shared, k=[1]), Opaque(s=shared)])
    assert a.s is b.s


def test_module_travels_with_raw_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(50))
    module[0].bias.requires_grad_(False)
    packed = pack(module)
    assert len(packed.tensors) == 7
    assert len(packed.meta) < 5000
    back = sent(module)
    assert isinstance(back[0].weight, torch.nn.Parameter)
    assert not back[0].bias.requires_grad
    x = torch.randn(4, 50)
    assert torch.equal(module(x), back(x))


def test_arrays_travel_as_buffers_and_arrive_writable() -> None:
    arrays = [np.arange(1000), np.arange(3), np.zeros((0, 2)), np.asfortranarray(np.ones((50, 40)))]
    packed = pack(arrays)
    assert [len(buffer) for buffer in packed.buffers] == [8000, 16000]
    for array, back in zip(arrays, sent(arrays), strict=True):
        np.testing.assert_array_equal(array, back)
        back += 1


def test_metadata_may_be_a_view_of_something_larger() -> None:
    meta = pack({"a": [1]}).meta
    assert unpack(memoryview(b"xx" + meta)[2:], []) == {"a": [1]}


def test_arrive_puts_other_tensors_into_the_tree() -> None:
    packed = pack({"x": torch.ones(2), "y": torch.zeros(2)})
    seen: list[torch.Tensor] = []

    def arrive(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.extend(tensors)
        return [tensor + 1 for tensor in tensors]

    back = unpack(packed.meta, [bytearray(b) for b in packed.buffers], arrive=arrive)
    assert [tensor.tolist() for tensor in seen] == [[1, 1], [0, 0]]
    assert back["x"].tolist() == [2, 2]


def test_what_arrive_raises_is_not_disguised() -> None:
    def arrive(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        raise KeyError("context")

    with pytest.raises(KeyError, match="context"):
        unpack(pack(1).meta, [], arrive=arrive)


def test_unpackable_names_the_path_and_what_to_do() -> None:
    nested = ("fn", (1, {"x": Point(0, Node("n", [lambda: None]))}))
    with pytest.raises(Unpackable, match="define a function at the top of a module") as caught:
        pack(nested)
    assert caught.value.path == "value[1][1]['x'].y.links[0]"
    assert "value[1][1]['x'].y.links[0]" in str(caught.value)


def test_unpackable_says_why() -> None:
    def local() -> None: ...

    cases: list[tuple[Any, str]] = [
        (local, "defined inside a function"),
        (decorated.__wrapped__, "another object"),
        (Opaque(lock=threading.Lock()), "pickle refuses it"),
    ]
    for value, reason in cases:
        with pytest.raises(Unpackable, match=reason):
            pack([value])


class FailsToPickle:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("while pickling")


def test_whatever_pickling_raises_is_unpackable() -> None:
    with pytest.raises(
        Unpackable, match=r"value\[0\].*ZeroDivisionError: while pickling"
    ) as caught:
        pack([FailsToPickle()])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_do_not_travel_say_what_to_send_instead() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    cases: list[tuple[Any, str]] = [
        (torch.nested.nested_tensor(parts), "layout=torch.jagged"),
        (torch.empty(4, dtype=torch.quint8), "dequantize"),
        (torch.empty(4, dtype=torch.quint4x2), "dequantize"),
        (torch.ones(3).untyped_storage(), "send a tensor that uses it"),
    ]
    for value, advice in cases:
        for message in (value, (torch.abs, (value,), {}), [value], [value, torch.ones(1)]):
            with pytest.raises(Unpackable, match=advice) as caught:
                pack(message)
            assert not re.search("(?i)internal|issue|bug", str(caught.value))


def test_tensor_without_memory_is_unpackable() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(Unpackable, match=r"value\['x'\]"):
            pack({"x": x})
        with pytest.raises(Unpackable, match=r"value\[1\]"):
            pack([torch.ones(1), x])
        return alone(x)

    def alone(x: torch.Tensor) -> torch.Tensor:
        for plain in (x, (torch.abs, (x,), {})):
            with pytest.raises(Unpackable):
                pack(plain)
        return x.sum()

    pack((torch.abs, (torch.ones(()),), {}))  # Of the same layout as what is inside.
    torch.vmap(inside)(torch.ones(3))
    torch.func.grad(alone)(torch.ones(3))


def test_too_deep_is_refused_at_both_ends() -> None:
    deep: list[Any] = []
    for _ in range(LIMITS.depth + 1):
        deep = [deep]
    with pytest.raises(Unpackable, match="deep"):
        pack(deep)
    with pytest.raises(CodecError, match="deeper"):
        unpack(bytes([0, 0]) + bytes([14, 1]) * 500 + bytes([0]), [])


@pytest.mark.parametrize("value", [unexported, Frozen(1, 2), Color.RED, Opaque(), torch.add, int])
def test_data_only_refuses_to_send_what_is_not_exported(value: Any) -> None:
    with pytest.raises(Unpackable, match="export"):
        pack(value, trust=Trust.DATA)


@pytest.mark.parametrize("value", [unexported, Frozen(1, 2), Color.RED, Opaque(), torch.add, int])
def test_data_only_refuses_what_arrives_unexported(value: Any) -> None:
    with pytest.raises(CodecError, match="data only"):
        unpack(pack(value).meta, [], trust=Trust.DATA)


def test_data_only_carries_what_is_exported() -> None:
    scope: list[Any] = []
    value = [exported, Record(1, [2]), Pair(1, 2), Mode.OFF, torch.float32, Ticket(1).number]
    assert sent(value, Trust.DATA, scope) == value
    assert sent(Ticket(3), Trust.DATA, scope).number == 3


def test_no_attribute_is_set_through_a_descriptor() -> None:
    record = Record(1)
    record.marked = 5  # type: ignore[attr-defined]
    meta = pack(record, trust=Trust.DATA).meta.replace(b"\x06marked", b"\x09__class__")
    with pytest.raises(CodecError, match="'__class__', which is no field of Record"):
        unpack(meta, [], trust=Trust.DATA)
    back = unpack(meta, [])
    assert type(back) is Record
    assert back.__dict__["__class__"] == 5


def test_unknown_names_are_refused_by_name() -> None:
    meta = pack(unexported).meta
    for old, new in ((b"unexported", b"unexporteX"), (b"codec_samples", b"codec_sampleX")):
        with pytest.raises(CodecError, match=r"codec_sample.*unexporte.* is not found"):
            unpack(meta.replace(old, new), [])


def test_extension_names_are_unique() -> None:
    with pytest.raises(ValueError, match=r"'test.ticket' is taken by Ticket"):
        extend("test.ticket", Opaque, lambda obj, scope: None, lambda data, scope: Opaque())


def test_left_over_bytes_and_buffers_are_refused() -> None:
    meta = pack([1, 2]).meta
    with pytest.raises(CodecError, match="1 bytes follow"):
        unpack(meta + b"\0", [])
    with pytest.raises(CodecError, match="0 of its 1 buffers"):
        unpack(meta, [bytearray(1)])
    with pytest.raises(CodecError, match="announces 4096 elements"):
        unpack(bytes([0, 0, 14, 255]) + (4096).to_bytes(8, "little") + bytes(100), [])
    with pytest.raises(CodecError, match="unknown tag 200"):
        unpack(b"\0\0\xc8", [])


@pytest.mark.parametrize(
    "limits", [Limits(meta=10), Limits(depth=1), Limits(items=2), Limits(tensors=1), Limits(dims=1)]
)
def test_each_limit_is_enforced(limits: Limits) -> None:
    packed = pack([[1, 2, 3.5], torch.ones(1, 1), torch.ones(1, 1)])
    buffers = [bytearray(b) for b in packed.buffers]
    with pytest.raises(CodecError, match=r"limit|deeper"):
        unpack(packed.meta, buffers, limits=limits)
    unpack(packed.meta, buffers)


def test_an_object_that_was_pickled_is_gone_with_its_last_user() -> None:
    gc.disable()
    try:
        value = Opaque(n=1)
        left = weakref.ref(value)
        arrived = weakref.ref(sent(value))
        assert arrived() is None
        del value
        assert left() is None
    finally:
        gc.enable()


def test_a_slot_of_a_dataclass_that_is_no_field_travels_too() -> None:
    value = OnSlots(1)
    value.hidden = 2  # type: ignore[attr-defined]
    arrived = sent([value])[0]
    assert (arrived.shown, arrived.hidden) == (1, 2)


def looked_up(name: str) -> object:
    return object_named(name, Trust.CODE)


def unpickled(name: str) -> object:
    module, _, attribute = name.partition(":")
    return TreeUnpickler(f"c{module}\n{attribute}\n.".encode(), ()).load()


@pytest.mark.parametrize("find", [looked_up, unpickled])
def test_threads_that_need_modules_of_one_package_at_once_get_them_whole(
    find: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package imports one module, and that another. Python takes the lock of a module before
    that of its package: two threads would wait for each other, and one get a module half made."""
    name = f"package_{find.__name__}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(
        f"import sys, time\nsys.begun.set()\ntime.sleep(0.5)\nfrom {name}.one import One\n"
    )
    (tmp_path / name / "one.py").write_text(f"from {name}.other import Other\nclass One: pass\n")
    (tmp_path / name / "other.py").write_text("class Other: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    begun = threading.Event()
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(find, f"{name}.other:Other")
        assert begun.wait(30)
        second = threads.submit(find, f"{name}.one:One")
        assert [each.result(30).__name__ for each in (first, second)] == ["Other", "One"]  # type: ignore[attr-defined]
