"""Calls between real processes: whom, what, with which values, how deep, in which order."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import outgoing
from tests.rpc import functions
from tests.rpc.functions import Account, Point, bounce, echo, echo_all, who_am_i

pytestmark = pytest.mark.usefixtures("workers")


# Whom.


@pytest.mark.parametrize("to", ["worker1", 1, rpc.WorkerInfo("worker1", 1)])
def test_a_worker_is_called_by_name_rank_or_info(to: Any) -> None:
    assert rpc.rpc_sync(to, who_am_i) == "worker1"


@pytest.mark.parametrize("to", ["main", 0])
def test_a_worker_calls_itself(to: Any) -> None:
    assert rpc.rpc_sync(to, who_am_i) == "main"
    assert rpc.rpc_async(to, who_am_i).wait() == "main"
    assert rpc.remote(to, who_am_i).to_here() == "main"


def test_a_call_to_oneself_gets_a_copy_as_any_other_call_does() -> None:
    x = torch.zeros(2)
    assert rpc.rpc_sync("main", torch.Tensor.add_, args=(x, 1)).tolist() == [1, 1]
    assert x.tolist() == [0, 0]


def test_workers_are_listed_with_names_and_ids() -> None:
    assert [info.name for info in rpc.get_worker_infos()] == ["main", "worker1", "worker2"]
    assert rpc.get_worker_info() == rpc.WorkerInfo("main", 0)
    assert rpc.get_worker_info("worker2").id == 2
    assert rpc.rpc_sync("worker1", rpc.get_worker_info) == rpc.get_worker_info("worker1")


# What.


def test_functions_methods_and_classes_are_called() -> None:
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", torch.Tensor.sum, args=(torch.ones(4),)) == 4
    assert rpc.rpc_sync("worker1", torch.ones(3).sum).item() == 3
    assert rpc.rpc_sync("worker1", torch.nn.functional.relu, args=(torch.tensor(-1.0),)) == 0
    assert rpc.rpc_sync("worker1", len, args=([1, 2],)) == 2
    assert rpc.rpc_sync("worker1", Account.double, args=(2,)) == 4
    assert rpc.rpc_sync("worker1", Account.kind) == "Account"
    assert rpc.rpc_sync("worker1", Account(1.0).add, args=(2.0,)) == 3.0
    assert rpc.rpc_sync("worker1", Account, args=(5.0,)).balance == 5.0
    assert rpc.rpc_sync("worker1", Point, args=(1, torch.ones(1))).x == 1


def test_a_module_is_called_by_a_copy_that_computes_the_same() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.randn(5, 3)
    assert torch.equal(rpc.rpc_sync("worker1", module, args=(x,)), module(x))
    back = rpc.rpc_sync("worker1", echo, args=(module,))
    assert torch.equal(back(x), module(x))
    assert isinstance(back[0].weight, torch.nn.Parameter)


def test_arguments_nest_as_people_nest_them() -> None:
    big = 1 << 4000
    args = (
        [1, (2.5, None, True), {"a": [torch.arange(3)], (1, 2): {"b"}}],
        frozenset({3}),
        -big,
        b"\0\xff",
        bytearray(b"x"),
        "text \N{SNOWMAN}",
        complex(1, -2),
        range(3),
        slice(1, None),
        ...,
        float("inf"),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
    )
    got, kwargs = rpc.rpc_sync("worker1", echo_all, args=args, kwargs={"key": {"deep": [args[2]]}})
    assert got[0][0] == 1
    assert got[0][2]["a"][0].tolist() == [0, 1, 2]
    assert got[0][2][1, 2] == {"b"}
    assert got[1:] == args[1:]
    assert [type(x) for x in got] == [type(x) for x in args]
    assert kwargs == {"key": {"deep": [-big]}}


def test_arguments_may_be_a_list_and_may_be_absent() -> None:
    assert rpc.rpc_sync("worker1", echo_all, args=[1, 2]) == ((1, 2), {})
    assert rpc.rpc_sync("worker1", echo_all) == ((), {})
    assert rpc.rpc_sync("worker1", echo_all, kwargs={"self": 1, "to": 2}) == (
        (),
        {"self": 1, "to": 2},
    )


def test_a_dataclass_and_an_exception_travel_as_values() -> None:
    point = rpc.rpc_sync("worker1", echo, args=(Point(3, torch.ones(2), ["t"]),))
    assert (point.x, point.y.tolist(), point.tags) == (3, [1, 1], ["t"])
    error = rpc.rpc_sync("worker1", echo, args=(KeyError("k", 2),))
    assert isinstance(error, KeyError)
    assert error.args == ("k", 2)


# Tensors.

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_as_it_was(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0]]).to(dtype)
    y = rpc.rpc_sync("worker1", echo, args=(x,))
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


def layouts() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    return {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "strided": torch.arange(10)[1::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "offset": torch.arange(10)[3:7],
        "empty": torch.empty(0, 5),
        "zero-dim": torch.tensor(3.5),
        "coo": dense.to_sparse_coo(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "large": torch.arange(1 << 18).view(512, 512).t(),
    }


@pytest.mark.parametrize("name", list(layouts()))
def test_every_layout_arrives_as_it_was(name: str) -> None:
    x = layouts()[name]
    y = rpc.rpc_sync("worker1", echo, args=(x,))
    assert y.layout == x.layout
    assert y.shape == x.shape
    assert y.is_quantized == x.is_quantized
    if name in ("transposed", "channels last", "large"):
        assert y.stride() == x.stride()
    assert torch.equal(_dense(y), _dense(x))


def _dense(x: torch.Tensor) -> torch.Tensor:
    if x.is_quantized:
        return x.dequantize()
    return x.to_dense() if x.layout != torch.strided else x


def test_tensors_that_share_memory_share_it_there_too() -> None:
    whole = torch.zeros(4)
    assert rpc.rpc_sync("worker1", functions.share_storage, args=((whole[:2], whole),)) == [
        7.0,
        7.0,
        0.0,
        0.0,
    ]
    left, right = rpc.rpc_sync("worker1", echo, args=((whole[:2], whole[1:]),))
    left.fill_(1.0)
    assert right[0] == 1.0


def test_a_large_tensor_comes_back_whole_and_may_be_written_to() -> None:
    x = torch.arange(1 << 22, dtype=torch.int32)
    y = rpc.rpc_sync("worker1", torch.neg, args=(x,))
    assert torch.equal(y, -x)
    y.add_(1)
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, args=(x,)), -x)


def test_a_tensor_may_be_changed_as_soon_as_the_call_has_begun() -> None:
    x = torch.zeros(1 << 16)
    futures = []
    for n in range(8):
        x.fill_(n)
        futures.append(rpc.rpc_async("worker1", torch.max, args=(x,)))
    assert [int(future.wait()) for future in futures] == list(range(8))


def test_large_tensors_of_many_threads_do_not_mix() -> None:
    def echo_many(seed: int) -> bool:
        x = torch.full((seed * 30_000 + 1,), seed)
        return all(torch.equal(rpc.rpc_sync("worker1", echo, args=(x,)), x) for _ in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(echo_many, range(8)))


# How deep.


def test_mutual_recursion_a_thousand_deep_returns() -> None:
    assert bounce(1000, ["main", "worker1"]) == 1000


def test_threads_that_wait_together_are_all_served_whatever_becomes_of_the_others() -> None:
    """Each that is served wakes the next: none may be forgotten when one leaves by another door."""
    shared = [rpc.rpc_async("worker1", functions.sleep_for, args=(0.05,)) for _ in range(4)]

    def client(number: int) -> int:
        served = 0
        for turn in range(100):
            if turn % 50 == 4 * number:
                with pytest.raises(RuntimeError, match="timed out"):
                    rpc.rpc_sync("worker1", functions.sleep_for, args=(0.5,), timeout=0.01)
            if turn == number:
                for future in shared:
                    future.wait()
            served += rpc.rpc_sync("worker1", echo, args=(1,))
        return served

    with ThreadPoolExecutor(12) as pool:
        served = [pool.submit(client, number) for number in range(12)]
        assert [future.result(60) for future in served] == [100] * 12


def test_calls_of_a_worker_to_itself_nest() -> None:
    assert rpc.rpc_sync("main", bounce, args=(200, ["main"])) == 200
    assert rpc.rpc_sync("worker1", bounce, args=(200, ["worker1"])) == 200


def test_rings_of_calls_from_many_threads_at_once_return() -> None:
    rings = [["main", "worker1", "worker2"], ["worker2", "main", "worker1"], ["worker2", "worker1"]]

    def go(number: int) -> int:
        ring = rings[number % 3]
        return int(rpc.rpc_sync(ring[0], bounce, args=(20, ring)))

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(go, range(36))) == [20] * 36


def test_a_call_that_waits_for_a_later_call_of_the_same_thread_is_not_in_its_way() -> None:
    first = rpc.rpc_async("worker1", functions.wait_event, args=("later",))
    rpc.rpc_sync("worker1", functions.set_event, args=("later",))
    assert first.wait() == "later"


def test_many_functions_that_hang_leave_room_for_others() -> None:
    hung = [rpc.rpc_async("worker1", functions.wait_event, args=("free all",)) for _ in range(100)]
    assert rpc.rpc_sync("worker1", who_am_i) == "worker1"
    rpc.rpc_sync("worker1", functions.set_event, args=("free all",))
    assert [future.wait() for future in hung] == ["free all"] * 100


# In which order.


def test_quick_calls_begin_in_the_order_in_which_they_were_made() -> None:
    rpc.rpc_sync("worker1", functions.take_recorded)
    futures = [rpc.rpc_async("worker1", functions.record, args=(n,)) for n in range(500)]
    torch.futures.wait_all(futures)
    assert rpc.rpc_sync("worker1", functions.take_recorded) == list(range(500))


# How many.


@pytest.fixture
def few_in_flight(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(outgoing, "MAX_CALLS_IN_FLIGHT", 10)
    return 10


def test_a_caller_waits_when_too_many_calls_are_in_flight(few_in_flight: int) -> None:
    begun: list[Any] = []

    def begin_too_many() -> None:
        for _ in range(few_in_flight + 5):
            begun.append(rpc.rpc_async("worker1", functions.wait_event, args=("room",)))

    caller = threading.Thread(target=begin_too_many)
    caller.start()
    while len(begun) < few_in_flight:
        time.sleep(0.001)
    caller.join(0.2)
    assert caller.is_alive()
    assert len(begun) == few_in_flight
    # From another worker: a call from here would have to wait, too.
    rpc.rpc_sync("worker2", rpc.rpc_sync, args=("worker1", functions.set_event, ("room",)))
    caller.join(30)
    assert [future.wait() for future in begun] == ["room"] * (few_in_flight + 5)


def test_room_is_made_by_any_call_that_ends_and_not_only_by_the_oldest(few_in_flight: int) -> None:
    oldest = rpc.rpc_async("worker1", functions.wait_event, args=("oldest may end",))
    for _ in range(5 * few_in_flight):
        rpc.rpc_async("worker1", functions.nothing)
    rpc.rpc_sync("worker1", functions.set_event, args=("oldest may end",))
    assert oldest.wait() == "oldest may end"


def test_a_call_that_finds_no_room_ends_at_its_deadline(few_in_flight: int) -> None:
    hung = [
        rpc.rpc_async("worker1", functions.wait_event, args=("much later",))
        for _ in range(few_in_flight)
    ]
    started = time.monotonic()
    with pytest.raises(rpc.CallTimeout):
        rpc.rpc_sync("worker1", functions.nothing, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 20
    rpc.rpc_sync("worker2", rpc.rpc_sync, args=("worker1", functions.set_event, ("much later",)))
    assert [future.wait() for future in hung] == ["much later"] * few_in_flight


def test_nested_calls_are_let_through_when_there_is_no_room(few_in_flight: int) -> None:
    assert bounce(100, ["main", "worker1"]) == 100


def test_thousands_of_calls_at_once_are_all_answered() -> None:
    futures = [rpc.rpc_async("worker1", echo, args=(n,)) for n in range(20_000)]
    assert [future.wait() for future in futures] == list(range(20_000))


# How long.


def test_a_call_ends_at_its_deadline_and_says_which() -> None:
    started = time.monotonic()
    with pytest.raises(rpc.CallTimeout, match=r"(?s)200 milliseconds.*wait_event.*'worker1'"):
        rpc.rpc_sync("worker1", functions.wait_event, args=("t1",), timeout=0.2)
    assert 0.2 <= time.monotonic() - started < 20
    rpc.rpc_sync("worker1", functions.set_event, args=("t1",))


def test_a_timeout_is_a_timeout_error_and_a_runtime_error() -> None:
    with pytest.raises(TimeoutError) as caught:
        rpc.rpc_sync("main", functions.wait_event, args=("t2",), timeout=0.05)
    assert isinstance(caught.value, RuntimeError)
    functions.set_event("t2")


def test_futures_end_at_their_deadlines_although_nobody_waits() -> None:
    ended = threading.Event()
    future = rpc.rpc_async("worker1", functions.wait_event, args=("t3",), timeout=0.1)
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(30)
    with pytest.raises(rpc.CallTimeout):
        future.wait()
    rpc.rpc_sync("worker1", functions.set_event, args=("t3",))


def test_deadlines_hold_whichever_thread_reads() -> None:
    """One thread reads for all: the deadlines of the others are shorter, and longer."""

    def wait_for(timeout: float) -> float:
        started = time.monotonic()
        with pytest.raises(rpc.CallTimeout):
            rpc.rpc_sync("worker1", functions.wait_event, args=("t4",), timeout=timeout)
        return time.monotonic() - started - timeout

    with ThreadPoolExecutor(8) as pool:
        late = list(pool.map(wait_for, [0.4, 0.1, 0.3, 0.2, 0.15, 0.25, 0.35, 0.05]))
    assert all(0 <= seconds < 5.0 for seconds in late), late
    rpc.rpc_sync("worker1", functions.set_event, args=("t4",))


def test_zero_means_no_deadline() -> None:
    future = rpc.rpc_async("worker1", functions.sleep_for, args=(0.3,), timeout=0)
    assert future._pending.deadline == float("inf")
    assert future.wait() == 0.3


def test_a_reply_after_the_deadline_disturbs_nothing() -> None:
    with pytest.raises(rpc.CallTimeout):
        rpc.rpc_sync("worker1", functions.wait_event, args=("t5",), timeout=0.05)
    rpc.rpc_sync("worker1", functions.set_event, args=("t5",))
    assert [rpc.rpc_sync("worker1", echo, args=(n,)) for n in range(100)] == list(range(100))
    assert rpc.debug_info()["calls in flight"] == []
