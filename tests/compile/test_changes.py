"""What may be another thing when a graph runs than it was when it was traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.autograd import AutogradError, UnknownContext
from telegrad.compile import calls, shapes
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.compile import functions as f
from tests.compile.checks import BACKENDS, compiled
from tests.scripts import run_script

pytestmark = pytest.mark.usefixtures("job")


def test_backward_in_a_graph_is_that_of_the_context_it_names() -> None:
    def step(x: Tensor, context_id: int) -> Tensor:
        loss = rpc.rpc_sync("worker1", f.layer, (x, x)).sum()
        autograd.backward(context_id, [loss])
        return loss.detach()

    run, _ = compiled(step, "aot_eager")
    x = torch.ones(3, 3, requires_grad=True)
    other = autograd.api.autograd_of().new_context()
    try:
        for function in (step, run):
            with (
                autograd.context() as context_id,
                pytest.raises(AutogradError, match="a call of another autograd context"),
            ):
                function(x, other.id)
            assert not autograd.get_gradients(other.id)
    finally:
        autograd.api.autograd_of().release(other.id)
    with autograd.context() as context_id:
        for unknown in (other.id, -1, -(1 << 32)):
            for function in (step, run):
                with pytest.raises(UnknownContext, match=str(unknown)):
                    function(x, unknown)
        run(x, context_id)
        assert x in autograd.get_gradients(context_id)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_contexts_of_workers_with_large_numbers_have_ids_that_no_integer_of_torch_holds(
    backend: str,
) -> None:
    def step(x: Tensor, context_id: int) -> None:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", f.layer, (x, x)).sum()])

    run, counter = compiled(step, backend)
    for worker in (5, 40_000, 65_535):
        for number in (1, 2):
            context_id = (worker << 48) + number
            with autograd.context(), pytest.raises(UnknownContext, match=str(context_id)):
                run(torch.ones(3, 3, requires_grad=True), context_id)
    assert counter.frame_count == 2


def test_a_graph_that_enters_a_context_does_not_do_so_inside_of_another() -> None:
    def step(x: Tensor) -> Tensor:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", f.layer, (x, x)).sum()
            autograd.backward(context_id, [loss])
        return loss.detach()

    run, _ = compiled(step, "aot_eager")
    run(torch.ones(3, 3))
    with autograd.context(), pytest.raises(AutogradError, match="do not nest"):
        run(torch.ones(3, 3))


def test_a_remote_function_that_returns_something_else_is_an_error_once() -> None:
    run, counter = compiled(lambda x: rpc.rpc_sync("worker1", f.summed, (x,)) * 2, "aot_eager")
    x = torch.arange(6.0).reshape(2, 3)
    rpc.rpc_sync("worker1", f.choose, (0,))
    torch.testing.assert_close(run(x), x.sum(0) * 2)
    rpc.rpc_sync("worker1", f.choose, (1,))
    with pytest.raises(rpc.TelegradError, match=r"shape \(2,\).*next call traces anew"):
        run(x)
    torch.testing.assert_close(run(x), x.sum(1) * 2)
    assert counter.frame_count == 2


def test_a_remote_module_that_is_frozen_and_thawed_gets_its_gradients() -> None:
    module, head = RemoteModule("worker1", nn.Linear, (3, 3)), nn.Linear(3, 3)
    run, counter = compiled(lambda x: head(module(x)).pow(2).sum(), "aot_eager")
    for frozen in (True, False, True, False):
        module.requires_grad_(not frozen)
        with autograd.context() as context_id:
            autograd.backward(context_id, [run(torch.ones(4, 3))])
            found = module.run(f.gradient_of_linear, context_id)
        assert (found is None) is frozen
    assert counter.frame_count == 2


@pytest.mark.parametrize("function", [f.through_frozen, f.picked_from_frozen])
def test_a_weight_that_is_thawed_elsewhere_is_an_error_once(function: Any) -> None:
    rpc.rpc_sync("worker1", f.thaw, (False,))
    run, counter = compiled(lambda x: rpc.rpc_sync("worker1", function, (x,)).sum(), "aot_eager")
    x = torch.ones(4, 3)
    with autograd.context():
        run(x)
    rpc.rpc_sync("worker1", f.thaw, (True,))
    with (
        autograd.context(),
        pytest.raises(rpc.TelegradError, match=r"have been thawed.*next call traces anew"),
    ):
        run(x)
    with autograd.context() as context_id:
        autograd.backward(context_id, [run(x)])
        assert rpc.rpc_sync("worker1", f.gradient_of_frozen, (context_id,)) is not None
    assert counter.frame_count == 2


def test_two_calls_that_return_the_same_for_two_kinds_are_both_checked() -> None:
    def step(x: Tensor) -> Tensor:
        pair = (
            rpc.rpc_sync("worker1", f.summed, (x[0],)),
            rpc.rpc_sync("worker1", f.summed, (x[0, 1:],)),
        )
        return pair[0] + pair[1]

    rpc.rpc_sync("worker1", f.choose, (0,))
    x = torch.arange(6.0).reshape(2, 3)
    torch.testing.assert_close(compiled(step, "aot_eager")[0](x), step(x))
    kinds = [len(known) for key, known in shapes._answers.items() if "summed" in key]
    assert 2 in kinds


def test_what_a_remote_function_returns_is_in_the_text_by_which_caches_know_a_graph() -> None:
    texts: list[str] = []

    def keep(graph: Any, _: object) -> Any:
        texts.append(graph.code)
        return graph

    for dimension in (0, 1, 0):
        torch._dynamo.reset()
        rpc.rpc_sync("worker1", f.choose, (dimension,))
        function = torch.compile(lambda x: rpc.rpc_sync("worker1", f.summed, (x,)), backend=keep)
        function(torch.ones(2, 3))
    assert texts[0] == texts[2] != texts[1]


def test_a_constant_that_is_equal_but_not_the_same_is_another() -> None:
    def call(x: Tensor, numbers: list[float]) -> Tensor:
        return rpc.rpc_sync("worker1", f.told, (x, numbers[0] * 1))

    run, _ = compiled(call, "aot_eager")
    given = [0.0, -0.0, 0.0, float("nan"), 1.0, True, 1]
    rpc.rpc_sync("worker1", f.take_log)
    for number in given:
        run(torch.ones(2), [number])
    assert rpc.rpc_sync("worker1", f.take_log) == [repr(number * 1) for number in given]


def test_strides_are_those_of_eager_mode_on_both_sides() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        turned = rpc.rpc_sync("worker1", f.turned, (x,))
        return (
            turned,
            rpc.rpc_sync("worker1", f.lies, (turned,)),
            rpc.rpc_sync("worker1", f.lies, (turned.contiguous(),)),
            rpc.rpc_sync("worker1", f.turned, (x[:, ::2],)),
        )

    run, counter = compiled(step, "aot_eager")
    for rows in (4, 5, 6):
        x = torch.randn(rows, 3)
        for got, expected in zip(run(x), step(x), strict=True):
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()
    assert counter.frame_count <= 2


def test_a_tensor_that_a_function_changes_by_calling_back_is_an_error() -> None:
    def step(x: Tensor) -> Tensor:
        return f.COUNTED * 2 + rpc.rpc_sync("worker1", f.call_back, (x,)) + f.COUNTED

    def does_not_read(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.call_back, (x,)) * 2

    x = torch.ones(3, requires_grad=True)
    run, _ = compiled(step, "aot_eager")
    for _ in range(2):
        with autograd.context(), pytest.raises(rpc.TelegradError, match=r"called back changed"):
            run(x)
    with autograd.context():
        torch.testing.assert_close(compiled(does_not_read, "aot_eager")[0](x).detach(), x * 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argument_that_a_function_changes_by_calling_back_is_an_error(backend: str) -> None:
    def step(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        return given["counted"] * 2 + rpc.rpc_sync("worker1", f.call_back, (x,))

    def later(x: Tensor, counted: Tensor) -> Tensor:
        future = rpc.rpc_async("worker1", f.call_back, (x,))
        return counted * 2 + future.wait()

    x = torch.ones(3)
    run, run_later = compiled(step, backend)[0], compiled(later, backend)[0]
    for _ in range(2):
        with autograd.context(), pytest.raises(rpc.TelegradError, match=r"called back changed"):
            run(x, {"counted": f.COUNTED})
        with pytest.raises(rpc.TelegradError, match=r"called back changed"):
            run(x, {"counted": f.COUNTED})
        with pytest.raises(rpc.TelegradError, match=r"called back changed"):
            run_later(x, f.COUNTED)
    torch.testing.assert_close(run(x, {"counted": x}), x * 3)


def test_outside_of_a_context_as_well_a_tensor_that_is_changed_by_calling_back_is_an_error() -> (
    None
):
    def step(x: Tensor) -> Tensor:
        return f.COUNTED * 2 + rpc.rpc_sync("worker1", f.call_back, (x,)) + f.COUNTED

    run, _ = compiled(step, "aot_eager")
    for _ in range(2):
        with pytest.raises(rpc.TelegradError, match=r"called back changed"):
            run(torch.ones(3))
    assert not calls._outside


def test_an_optimizer_is_the_one_that_is_given_and_no_graph_keeps_it() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [DistributedOptimizer(torch.optim.SGD, [w], lr=0.1) for w in weights]
    mine = optimizers[0]

    def step(weight: Tensor, optimizer: Any) -> None:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", f.say, (weight, "step")).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    def step_of_mine() -> None:
        step(weights[0], mine)

    run, _ = compiled(step, "aot_eager")
    for weight, optimizer in [*zip(weights, optimizers, strict=True)] * 2:
        run(weight, optimizer)
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full((3,), 0.8))
    run_mine, _ = compiled(step_of_mine, "aot_eager")
    run_mine()
    optimizers.clear()
    mine = DistributedOptimizer(torch.optim.SGD, [weights[0]], lr=0.5)
    run_mine()
    torch.testing.assert_close(weights[0].detach(), torch.full((3,), 0.2))


TWO_JOBS = """
import torch, telegrad
from telegrad import rpc
from torch._dynamo.testing import CompileCounterWithBackend

def whose(x, size):
    return x * rpc.get_worker_info().id

counter = CompileCounterWithBackend("aot_eager")
run = torch.compile(
    lambda x: rpc.rpc_sync("b", whose, (x, 1)), backend=counter, fullgraph=True
)
make = torch.compile(lambda x: rpc.remote("b", whose, (x, 1)), backend="eager", fullgraph=True)
ask = torch.compile(lambda r, x: x * r.owner().id, backend="eager", fullgraph=True)

def main():
    x = torch.ones(2)
    told = rpc.rpc_sync("b", whose, (x, 1))
    torch.testing.assert_close(run(x), told)
    torch.testing.assert_close(ask(make(x), x), told)

if __name__ == "__main__":
    torch._dynamo.config.recompile_limit = 2
    for workers in (["a", "b"], ["b", "a"], ["a", "b"]):
        telegrad.run(main, workers=workers)
    print(counter.frame_count)
"""


STARTED_ANEW = """
import os, torch, telegrad
from telegrad import autograd, rpc
from telegrad.rpc import WorkerLost
from torch._dynamo.testing import CompileCounterWithBackend

def doubled(x):
    return x * 2

def whose(x):
    return x * rpc.get_worker_info().id

counter = CompileCounterWithBackend("aot_eager")
run = torch.compile(
    lambda x: rpc.rpc_sync("a", doubled, (x,)).pow(2).sum(), backend=counter, fullgraph=True
)
make = torch.compile(lambda x: rpc.remote("a", whose, (x,)), backend="eager", fullgraph=True)
ask = torch.compile(lambda r, x: x * r.owner().id, backend="eager", fullgraph=True)

def check():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [run(x)])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], 8 * x.detach())
    x = x.detach()
    torch.testing.assert_close(ask(make(x), x), rpc.rpc_sync("a", whose, (x,)))

def main():
    check()
    for _ in range(2):
        try:
            rpc.rpc_sync("a", os._exit, (3,))
        except WorkerLost:
            pass
        rpc.wait_for_worker("a", timeout=30)
        check()

if __name__ == "__main__":
    telegrad.run(main, workers=["a"], restarts=2)
    print(counter.frame_count)
"""


def test_a_worker_that_is_started_anew_is_called_by_the_graphs_that_there_are(
    tmp_path: Any,
) -> None:
    script = tmp_path / "started_anew.py"
    script.write_text(STARTED_ANEW)
    ran = run_script(script)
    assert ran.stdout.strip() == "1", ran.stderr


def test_a_reference_that_a_graph_made_belongs_to_its_context() -> None:
    def make(x: Tensor) -> Any:
        return rpc.remote("worker1", f.layer, (x, x))

    def use(reference: Any, x: Tensor) -> Tensor:
        return (reference.to_here() * x).sum()

    run_make, run_use = compiled(make, "aot_eager")[0], compiled(use, "aot_eager")[0]
    x = torch.ones(2, 3, requires_grad=True)
    with autograd.context():
        reference = run_make(x)
    with autograd.context() as context_id:
        loss = run_use(reference, x)
        with pytest.raises(AutogradError, match="a call of another autograd context"):
            autograd.backward(context_id, [loss])


def test_each_job_finds_its_own_workers_under_the_names_of_the_last(tmp_path: Any) -> None:
    script = tmp_path / "two_jobs.py"
    script.write_text(TWO_JOBS)
    ran = run_script(script)
    assert ran.stdout.strip() == "3", ran.stderr
