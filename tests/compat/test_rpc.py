"""The habits of torch's RPC that telegrad itself does not have."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.compat import functions


def test_an_error_is_printed_where_it_happened(
    alone: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="out of order"):
        alone.rpc_sync("me", functions.fail, args=("out of order",))
    printed = capsys.readouterr().err
    assert "On WorkerInfo(id=0, name=me)" in printed
    assert "out of order" in printed


def test_an_error_that_words_do_not_make_arrives_as_a_runtime_error(alone: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"exception on remote side was Precise.*out of range"):
        alone.rpc_sync("me", functions.fail_precisely)


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), FileNotFoundError(2, "nope", "f.txt"), AssertionError(), StopIteration(3)],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_of_its_own_class_and_a_runtime_error_as_of_stock(
    alone: ModuleType, error: Exception
) -> None:
    with pytest.raises(RuntimeError) as told:
        alone.rpc_sync("me", functions.fail_with, args=(error,))
    assert isinstance(told.value, type(error))
    assert type(told.value).__name__ == type(error).__name__
    assert str(told.value) == str(error)
    with pytest.raises(type(error)):
        alone.rpc_async("me", functions.fail_with, args=(error,)).wait()
    with pytest.raises(type(error)):
        alone.remote("me", functions.fail_with, args=(error,)).to_here()


@pytest.mark.parametrize("error", [KeyError("k"), ZeroDivisionError("z")], ids=repr)
def test_the_error_of_a_method_is_of_its_own_class_and_a_runtime_error_too(
    alone: ModuleType, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    rref = alone.remote("me", functions.Failing)
    for call in (
        lambda: rref.rpc_sync().fail_with(error),
        lambda: rref.rpc_async().fail_with(error).wait(),
    ):
        with pytest.raises(RuntimeError) as told:
            call()
        assert isinstance(told.value, type(error))
        assert str(told.value) == str(error)
        assert "On WorkerInfo(id=0, name=me)" in capsys.readouterr().err


def test_the_error_of_a_method_that_words_do_not_make_is_a_runtime_error(alone: ModuleType) -> None:
    rref = alone.remote("me", functions.Failing)
    with pytest.raises(RuntimeError, match=r"exception on remote side was Precise.*out of range"):
        rref.rpc_sync().fail_precisely()


def test_a_method_of_a_value_that_could_not_be_made_fails_with_a_runtime_error(
    alone: ModuleType,
) -> None:
    rref = alone.remote("me", functions.fail_with, args=(KeyError("never made"),))
    with pytest.raises(RuntimeError, match="never made"):
        rref.rpc_sync().increase()


def test_the_error_of_a_value_is_of_its_own_class_alone(alone: ModuleType) -> None:
    failing = alone.remote("me", functions.Failing)
    error = KeyError("k")
    for rref in (
        alone.remote("me", functions.fail_with, args=(error,)),
        failing.remote().fail_with(error),
    ):
        with pytest.raises(KeyError) as told:
            rref.to_here()
        assert type(told.value) is KeyError


def test_a_method_that_the_value_lacks_is_an_attribute_error(alone: ModuleType) -> None:
    rref = alone.remote("me", functions.Counter, args=(1,))
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        rref.rpc_sync().missing()


def test_a_method_that_runs_for_too_long_is_named(alone: ModuleType) -> None:
    functions.release.clear()
    rref = alone.RRef(functions.release)
    with pytest.raises(RuntimeError, match="method 'wait' of OwnerRRef"):
        rref.rpc_sync(timeout=0.05).wait(30)
    functions.release.set()


def test_an_error_that_passes_two_workers_keeps_its_class_and_attributes(alone: ModuleType) -> None:
    call = ("me", functions.fail_unusually)
    with pytest.raises(RuntimeError, match="nowhere") as told:
        alone.rpc_sync("me", alone.rpc_sync, args=call)
    assert isinstance(told.value, functions.Unusual)
    assert told.value.hint == "look elsewhere"


@pytest.mark.parametrize("error", [ValueError("v"), TypeError("t"), functions.Picky("p")])
def test_errors_that_stock_gives_as_such_are_no_runtime_errors(
    alone: ModuleType, error: Exception
) -> None:
    with pytest.raises(type(error)) as told:
        alone.rpc_sync("me", functions.fail_with, args=(error,))
    assert type(told.value) is type(error)


def test_an_operator_with_wrong_arguments_fails_in_the_words_of_torch(alone: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"failed to match any schema: add\(\) received"):
        alone.rpc_sync("me", torch.add)


def test_several_tensors_of_an_operator_are_a_list_as_of_stock(alone: ModuleType) -> None:
    assert type(alone.rpc_sync("me", torch.split, args=(torch.ones(4), 2))) is list
    assert type(alone.remote("me", torch.unbind, args=(torch.ones(2, 2),)).to_here()) is list
    assert type(alone.rpc_sync("me", torch.var_mean, args=(torch.ones(4),))) is tuple
    assert type(alone.rpc_sync("me", divmod, args=(7, 2))) is tuple


def test_a_function_that_the_callee_lacks_fails_in_the_words_of_torch(
    alone: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = functions.add_one
    alone.rpc_sync("me", call, args=(torch.ones(1),))
    monkeypatch.delattr(functions, "add_one")
    with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
        alone.rpc_sync("me", call, args=(torch.ones(1),))


NAMES = ("self", "function", "rref", "timeout", "name", "args", "kwargs", "to", "func", "method")


@pytest.mark.parametrize("name", NAMES)
def test_a_keyword_argument_may_have_any_name(alone: ModuleType, name: str) -> None:
    call = (functions.names_of, (), {name: 1})
    assert alone.rpc_sync("me", *call) == [name]
    assert alone.rpc_async("me", *call).wait() == [name]
    assert alone.remote("me", *call).to_here() == [name]


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_keyword_argument_of_a_method_may_have_any_name(alone: ModuleType, name: str) -> None:
    rref = alone.remote("me", functions.Named)
    assert rref.rpc_sync().names_of(**{name: 1}) == [name]
    assert rref.rpc_async().names_of(**{name: 1}).wait() == [name]
    assert rref.remote().names_of(**{name: 1}).to_here() == [name]


def test_an_unset_timeout_is_that_of_the_job_and_zero_is_none(alone: ModuleType) -> None:
    functions.release.clear()
    alone._set_rpc_timeout(0.05)
    assert alone.get_rpc_timeout() == 0.05
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        alone.rpc_sync("me", functions.wait_for_release)
    endless = alone.rpc_async("me", functions.wait_for_release, timeout=0)
    functions.release.set()
    assert endless.wait() == "released"


def test_wait_all_ends_with_the_first_error_while_others_run(alone: ModuleType) -> None:
    functions.release.clear()
    slow = alone.rpc_async("me", functions.wait_for_release)
    broken = alone.rpc_async("me", functions.fail, args=("broken",))
    with pytest.raises(ValueError, match="broken"):
        torch.futures.wait_all([slow, broken])
    assert not slow.done()
    functions.release.set()
    assert torch.futures.wait_all([slow]) == ["released"]
    assert torch.futures.wait_all([]) == []


def test_wait_all_takes_futures_of_every_kind_from_anything_that_gives_them(
    alone: ModuleType,
) -> None:
    calls = (alone.rpc_async("me", abs, args=(-number,)) for number in range(3))
    assert torch.futures.wait_all(calls) == [0, 1, 2]
    local: torch.futures.Future[int] = torch.futures.Future()
    local.set_result(1)
    chained = local.then(lambda future: future.wait() + 1)
    assert torch.futures.wait_all((local, chained)) == [1, 2]


@pytest.mark.parametrize("wrong", [[1], [None], "ab", 1], ids=repr)
def test_wait_all_refuses_what_is_no_future_as_stock_does(installed: None, wrong: Any) -> None:
    with pytest.raises(TypeError):
        torch.futures.wait_all(wrong)


def test_a_block_waits_for_the_futures_made_in_it(alone: ModuleType) -> None:
    with alone._wait_all():
        futures = alone.api._thread_local_var.future_list
        alone.rpc_async("me", functions.add_one, args=(torch.ones(1),))
        assert len(futures) == 1
    assert futures[0].done()
    assert not hasattr(alone.api._thread_local_var, "future_list")


def test_the_class_of_a_value_is_asked_for_once(alone: ModuleType) -> None:
    rref = alone.remote("me", functions.Counter, args=(1,))
    first = rref._get_type(blocking=False)
    assert first.wait() is functions.Counter
    assert rref._get_type(blocking=False) is first


def test_a_proxy_for_remote_calls_fails_at_once_without_such_a_method(alone: ModuleType) -> None:
    rref = alone.remote("me", functions.Counter, args=(1,))
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        rref.remote().missing()
    assert rref.remote().increase(by=2).to_here() == 3
    assert rref.rpc_sync().increase() == 4


def test_the_creation_of_a_reference_has_a_future(alone: ModuleType) -> None:
    rref = alone.remote("me", functions.Counter, args=(1,))
    rref._get_future().wait()
    with pytest.raises(RuntimeError, match="it has no future"):
        alone.RRef(1)._get_future()


def test_a_hint_at_the_type_of_what_is_not_compiled_is_refused(alone: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="type_hint should only be specified"):
        alone.RRef(torch.ones(1), type_hint=torch.Tensor)
    module = torch.jit.script(torch.nn.Linear(1, 1))
    assert alone.RRef(module, object).local_value() is module


def test_references_are_equal_only_to_themselves(alone: ModuleType) -> None:
    rref = alone.RRef(1)
    same = alone.rpc_sync("me", functions.unwrap, args=(Holder(rref),))
    assert same.local_value() == rref.local_value()
    assert same != rref
    assert rref == rref


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_reference_is_dead_after_the_shutdown(alone: ModuleType) -> None:
    rref = alone.RRef(1)
    alone.shutdown()
    with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion"):
        rref.to_here()
    with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
        alone.internal.serialize(rref)


def test_the_pickler_sets_tensors_and_references_aside(alone: ModuleType) -> None:
    tensor, rref = torch.ones(3), alone.RRef(1)
    data, table = alone.internal.serialize({"tensor": tensor, "rref": [rref]})
    assert [type(entry) for entry in table] == [torch.Tensor, alone.RRef]
    again = alone.internal.deserialize(data, table)
    assert again["tensor"] is tensor
    assert again["rref"] == [rref]


def test_a_pickler_of_the_user_makes_the_calls_of_its_block(alone: ModuleType) -> None:
    used = []

    class Pickler(type(alone.internal._internal_rpc_pickler)):  # type: ignore[misc]
        def serialize(self, obj: Any) -> Any:
            used.append(obj.func)
            return super().serialize(obj)

    with alone.api._use_rpc_pickler(Pickler()):
        result = alone.rpc_sync("me", functions.add_one, args=(torch.ones(1),))
    assert result.item() == 2
    assert used == [functions.add_one]


def test_a_class_with_a_registered_reducer_travels_by_it(alone: ModuleType) -> None:
    alone.internal._internal_rpc_pickler._register_reducer(
        functions.Wrapped, lambda wrapped: (functions.rebuild_wrapped, (wrapped.value,))
    )
    sent = functions.Wrapped(torch.ones(2))
    word, tensor = alone.rpc_sync("me", functions.unwrap, args=(sent,))
    assert word == "rebuilt"
    assert torch.equal(tensor, torch.ones(2))


def test_compiled_functions_are_called_by_their_names(alone: ModuleType) -> None:
    assert alone.rpc_sync("me", compiled_double, args=(torch.ones(2),)).sum() == 4


@torch.jit.script
def compiled_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_worker_that_says_neither_its_rank_nor_how_many_there_are_is_refused(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.rpc as rpc

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    try:
        with pytest.raises(RuntimeError, match=r"worker_id needs to be.*neither a rank nor"):
            rpc.init_rpc("me")
        by_file = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
        with pytest.raises(ValueError, match="rank parameter missing"):
            rpc.init_rpc("me", rpc_backend_options=by_file)
        assert not rpc._is_current_rpc_agent_set()
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


def test_devices_are_refused_in_words(installed: None, tmp_path: Path) -> None:
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{tmp_path}/store", device_maps={"me": {"cuda:0": "cuda:0"}}
    )
    with pytest.raises(RuntimeError, match=r"\.cpu\(\)"):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    assert not rpc._is_current_rpc_agent_set()


def test_a_proxy_of_ones_own_calls_by_the_function_that_it_is_given(alone: ModuleType) -> None:
    from torch.distributed.rpc.rref_proxy import RRefProxy

    rref = alone.remote("me", functions.Counter, args=(1,))
    assert RRefProxy(rref, alone.rpc_sync).increase(by=2) == 3
    assert RRefProxy(rref, alone.rpc_async, timeout=5).increase().wait() == 4
    assert RRefProxy(rref, alone.remote).increase().to_here() == 5


def test_what_is_missing_says_so(installed: None) -> None:
    import torch.distributed.rpc as rpc

    with pytest.raises(AttributeError, match="on telegrad"):
        rpc.something_else  # noqa: B018
    assert sys.modules["torch.distributed.rpc"] is rpc


def test_the_errors_of_a_local_backward_name_the_worker(alone: ModuleType) -> None:
    import torch.distributed.autograd as dist_autograd

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: Any) -> Any:
            raise KeyError("broken on purpose")

    leaf = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = Broken.apply(leaf).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"Error on Node 0: .*broken on purpose"):
            dist_autograd.backward(context_id, [loss])


def test_both_interfaces_serve_one_job(alone: ModuleType) -> None:
    import telegrad

    rref = alone.remote("me", functions.Counter, args=(1,))
    assert telegrad.rpc.rpc_sync("me", functions.value_of, args=(rref,)) == 1
    native = telegrad.rpc.remote("me", functions.Counter, args=(2,))
    assert alone.rpc_sync("me", functions.value_of, args=(native,)) == 2


def test_coroutines_are_functions_too(alone: ModuleType) -> None:
    assert alone.rpc_sync("me", functions.add_two_later, args=(torch.ones(1),)).item() == 3


def test_the_owner_runs_backward_for_a_reference(alone: ModuleType) -> None:
    leaf = torch.ones(2, requires_grad=True)
    alone.RRef(leaf.sum() * 3).backward()
    assert torch.equal(leaf.grad, torch.full((2,), 3.0))
    with pytest.raises(RuntimeError, match="should contain a tensor"):
        alone.RRef("no tensor").backward()


def test_a_call_under_no_grad_records_nothing_and_runs_without_grad(alone: ModuleType) -> None:
    import torch.distributed.autograd as dist_autograd

    leaf = torch.ones(2, requires_grad=True)
    with dist_autograd.context(), torch.no_grad():
        assert alone.rpc_sync("me", torch.is_grad_enabled) is False
        assert not alone.rpc_sync("me", functions.add_one, args=(leaf,)).requires_grad


def test_the_class_of_references_is_in_the_module_of_calls_too(alone: ModuleType) -> None:
    assert alone.api.PyRRef is alone.PyRRef
