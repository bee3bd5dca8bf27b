"""Errors of remote functions: their own type, the worker's name, the remote traceback."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import Unpackable
from tests.rpc import functions
from tests.rpc.fleet import Process

pytestmark = pytest.mark.usefixtures("workers")


def error_of(name: str, to: str = "worker1") -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        rpc.rpc_sync(to, functions.raise_named, args=(name,))
    return caught.value


def test_an_error_keeps_its_type_and_shows_worker_and_traceback() -> None:
    with pytest.raises(ValueError, match=r"^bad number$") as caught:
        rpc.rpc_sync("worker1", functions.raise_value_error, args=("bad number",))
    cause = str(caught.value.__cause__)
    assert "on worker 'worker1'" in cause
    assert "in raise_value_error" in cause


def test_an_error_keeps_its_type_in_futures_references_and_on_oneself() -> None:
    for to in ("worker1", "main"):
        with pytest.raises(ValueError, match="x"):
            rpc.rpc_async(to, functions.raise_value_error, args=("x",)).wait()
        with pytest.raises(ValueError, match="x"):
            rpc.remote(to, functions.raise_value_error, args=("x",)).to_here()
        with pytest.raises(ValueError, match="x"):
            rpc.rpc_sync(to, functions.raise_value_error, args=("x",))


def test_the_remote_traceback_tells_causes() -> None:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync("worker1", functions.raise_with_cause)
    assert "the first" in str(caught.value.__cause__)


def test_an_error_that_crosses_several_workers_names_each() -> None:
    with pytest.raises(LookupError, match="on worker1") as caught:
        rpc.rpc_sync("worker1", functions.raise_at, args=(["worker1", "worker2", "worker1"],))
    text = str(caught.value.__cause__)
    assert "on worker 'worker1'" in text
    assert "on worker 'worker2'" in text


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("needs two", functions.NeedsTwo, "7 at gate"),
        ("garbled", functions.Garbled, "code 7"),
        ("keyword", functions.Keyword, "code 7"),
        ("holds lock", functions.HoldsLock, "it holds a lock"),
        ("gate shut", functions.GateShut, "7 at gate shut"),
        ("disk full", functions.DiskFull, "[Errno 28] No space left: '/disk'"),
        (
            "bad text",
            functions.BadText,
            "'utf-8' codec can't decode byte 0x61 in position 0: up",
        ),
        ("tagged", functions.Tagged, "tagged (1 sub-exception)"),
        ("secretive", functions.Secretive, "7 at gate"),
    ],
)
def test_an_error_that_its_arguments_do_not_make_keeps_its_type(
    name: str, kind: type, words: str
) -> None:
    error = error_of(name)
    assert type(error) is kind
    assert str(error) == words
    assert "on worker 'worker1'" in str(error.__cause__)


def test_an_error_keeps_its_attributes_and_names_those_that_cannot_be_sent() -> None:
    assert error_of("needs two").__dict__ == {"code": 7, "where": "gate"}
    assert "left out what cannot be sent of this error: lock" in error_of("holds lock").__notes__[0]


def test_tensors_in_an_error_arrive_with_it() -> None:
    error = error_of("tensor")
    assert type(error) is ValueError
    assert torch.equal(error.args[1], torch.ones(100_000))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaks", ["BreaksWhenRebuilt", "worker1"]),
        ("local", ["Local", "made inside of a function", "worker1"]),
        ("unprintable", []),
        ("surrogate", []),
    ],
)
def test_an_error_that_cannot_travel_is_described(name: str, words: list[str]) -> None:
    error = error_of(name)
    assert isinstance(error, Exception)
    for word in words:
        assert word in str(error)
    assert "on worker 'worker1'" in str(error.__cause__)


@pytest.mark.parametrize("to", ["worker1", "main"])
def test_a_value_whose_making_failed_without_words_is_not_waited_for(to: str) -> None:
    made = rpc.remote(to, functions.raise_named, args=("unprintable",))
    for _ in range(2):
        with pytest.raises(rpc.RemoteError, match=r"Unprintable: \(its message"):
            made.to_here(timeout=20)


@pytest.mark.parametrize("name", ["interrupt", "exit"])
def test_a_function_that_ends_its_process_only_ends_its_call(name: str) -> None:
    error = error_of(name)
    assert isinstance(error, rpc.RemoteError)
    assert rpc.rpc_sync("worker1", functions.who_am_i) == "worker1"


@pytest.mark.parametrize("name", ["group", "stop iteration", "assertion", "os error"])
def test_builtin_errors_arrive_whole(name: str) -> None:
    error = error_of(name)
    with pytest.raises(type(error)) as here:
        functions.raise_named(name)
    assert str(error) == str(here.value)
    assert type(error) is type(here.value)


def test_a_recursion_error_on_a_worker_is_an_error_and_no_more() -> None:
    with pytest.raises(RecursionError):
        rpc.rpc_sync("worker1", functions.recurse_for_ever, args=(0,))
    assert rpc.rpc_sync("worker1", functions.who_am_i) == "worker1"


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so() -> None:
    words = r"result\['k'\]\[0\] \(of type lock\) in the result of .*unsendable_inside on .*worker1"
    with pytest.raises(Unpackable, match=words):
        rpc.rpc_sync("worker1", functions.give_unsendable_inside)
    with pytest.raises(Unpackable, match=r"in the value of a reference on worker 'worker1'"):
        rpc.remote("worker1", functions.give_unsendable_inside).to_here()


def test_what_cannot_be_read_names_the_worker_that_could_not() -> None:
    with pytest.raises(rpc.CodecError, match=r"worker 'worker1' cannot read a call: .*rebuilt"):
        rpc.rpc_sync("worker1", functions.echo, args=(functions.FailsToArrive(),))
    words = r"result of .*give_unreadable on worker 'worker1' cannot be read on worker 'main'"
    with pytest.raises(rpc.CodecError, match=words):
        rpc.rpc_sync("worker1", functions.give_unreadable)


def test_all_that_telegrad_says_of_values_is_a_telegrad_error() -> None:
    assert issubclass(Unpackable, rpc.TelegradError)
    assert issubclass(Unpackable, TypeError)
    assert issubclass(rpc.CodecError, rpc.TelegradError)
    assert issubclass(rpc.CodecError, ValueError)


@pytest.mark.filterwarnings("error")
def test_a_coroutine_function_needs_no_mark_and_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"an `async def` function needs none"):
        rpc.rpc_sync("main", functions.marked_without_need)


# Bad input on this side: said at once, nothing leaves.


def test_an_unknown_worker_is_named_with_those_that_exist() -> None:
    for to in ("nobody", 9, rpc.WorkerInfo("nobody", 1)):
        with pytest.raises(rpc.UnknownWorker, match=r"main \(0\), worker1 \(1\), worker2 \(2\)"):
            rpc.rpc_sync(to, functions.nothing)
        with pytest.raises(rpc.UnknownWorker):
            rpc.rpc_async(to, functions.nothing)
        with pytest.raises(rpc.UnknownWorker):
            rpc.remote(to, functions.nothing)


@pytest.mark.parametrize("to", [None, 1.0, True, ["worker1"]])
def test_what_is_no_worker_is_refused(to: Any) -> None:
    with pytest.raises(ValueError, match="name a worker by its name"):
        rpc.rpc_sync(to, functions.nothing)


def test_a_lambda_and_a_local_function_are_refused_by_name() -> None:
    def local() -> None:
        """Nobody else can find it."""

    for function in (lambda: 1, local):
        with pytest.raises(Unpackable, match=r"lambda|local") as caught:
            rpc.rpc_sync("worker1", function)
        assert "module" in str(caught.value)


def test_a_function_that_the_worker_cannot_import_is_named() -> None:
    import types

    module = types.ModuleType("only_here")
    exec("def f(): return 1", module.__dict__)
    import sys

    sys.modules["only_here"] = module
    try:
        with pytest.raises(Exception, match="only_here"):
            rpc.rpc_sync("worker1", module.f)
    finally:
        del sys.modules["only_here"]
    assert rpc.rpc_sync("worker1", functions.who_am_i) == "worker1"


@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("to", ["worker1", "main"])
def test_an_argument_that_cannot_be_sent_is_found_by_its_path(call: Any, to: str) -> None:
    purpose = rf"for the call of tests\.rpc\.functions\.echo on worker '{to}'"
    with pytest.raises(Unpackable, match=rf"args\[0\]\[1\]\['k'\] \(of type lock\) {purpose}"):
        call(to, functions.echo, args=([1, {"k": threading.Lock()}],))
    with pytest.raises(Unpackable, match=rf"kwargs\['x'\] \(of type lock\) {purpose}"):
        call(to, functions.echo, kwargs={"x": threading.Lock()})
    with pytest.raises(Unpackable, match=r"cannot send func \(of type function\)"):
        call(to, lambda: 1)


def test_a_methods_argument_that_cannot_be_sent_is_found_by_its_path() -> None:
    rref = rpc.remote("worker1", dict)
    with pytest.raises(
        Unpackable, match=r"args\[0\] .* for the call of update on worker 'worker1'"
    ):
        rref.rpc_sync().update(threading.Lock())


@pytest.mark.parametrize("value", [functions.FailsToPickle(), torch.futures.Future()])
def test_whatever_pickling_raises_is_said_of_the_argument(value: Any) -> None:
    with pytest.raises(Unpackable, match=r"args\[0\].*pickle refuses it: .*; leave it out"):
        rpc.rpc_sync("worker1", functions.echo, args=(value,))


def test_what_is_not_callable_is_an_error() -> None:
    with pytest.raises(TypeError):
        rpc.rpc_sync("worker1", 3)  # type: ignore[arg-type]


def test_wrong_arguments_are_the_callees_type_error() -> None:
    with pytest.raises(TypeError, match="nothing"):
        rpc.rpc_sync("worker1", functions.nothing, args=(1, 2))


def test_a_string_is_no_function(workers: dict[str, Process]) -> None:
    """Names are what the workers' own operations are called by: users must not reach them."""
    with pytest.raises(TypeError):
        rpc.rpc_sync("worker1", "fetch", args=((1, 1, 1),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rpc.rpc_async("worker1", "no such thing")  # type: ignore[arg-type]


def test_errors_leave_no_call_behind() -> None:
    for name in ("local", "interrupt", "surrogate"):
        error_of(name)
    assert rpc.debug_info()["calls in flight"] == []
    assert torch.equal(rpc.rpc_sync("worker1", torch.ones, args=(2,)), torch.ones(2))
