"""What this room relies upon in torch without torch promising it."""

from __future__ import annotations

import gc
import threading
from types import CodeType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from telegrad.compile import sites, torch_private
from telegrad.compile.expressions import evaluate
from telegrad.compile.ops import ops
from telegrad.compile.tracing import constant_of_graph


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def compiled(function: Any) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=True), counter


def test_sizes_of_fakes_are_formulas_of_the_sizes_of_arguments() -> None:
    fakes = torch_private.Fakes()
    x = fakes.tensor(0, torch.float32, (4, 3), (True, False), (3, 1), "cpu", False)
    with fakes.active():
        joined = torch.cat([x, x[1:]])
    formula = fakes.formula(joined.shape[0])
    assert evaluate(formula, [(6, 3)], [(3, 1)], [], lambda _: 0) == 11
    assert torch_private.hint_of(joined.shape[0]) == 7
    assert fakes.guards()
    assert fakes.is_contiguous(x)
    assert not fakes.is_contiguous(x.t())


def test_operators_that_want_numbers_for_sizes_take_symbols_and_data_is_asked_for_in_vain() -> None:
    fakes = torch_private.Fakes()
    x = fakes.tensor(0, torch.float32, (4, 3), (True, False), (3, 1), "cpu", False)
    with fakes.active():
        padded = torch.nn.functional.pad(x, (0, x.shape[0]))
        for ask in (lambda: bool(x.sum() > 0), lambda: x.numpy(), lambda: x.sum().item() > 0):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is in question
                bool(ask())
            assert torch_private.asks_for_data(caught.value)
    assert evaluate(fakes.formula(padded.shape[1]), [(6, 3)], [(3, 1)], [], lambda _: 0) == 9
    assert not torch_private.asks_for_data(ValueError("another"))


_given: list[Any] = []


@constant_of_graph
def _note(function: Any, rest: Any) -> int:
    _given.append((function, rest))
    return len(_given)


torch_private.explain_constants(_note, lambda: AssertionError("not constant"))
torch_private.guard_callables(_note)


@torch.no_grad()
def _one(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def _other(x: Tensor) -> Tensor:
    return x


def test_what_can_be_called_is_guarded_by_identity_and_wrappers_are_given_as_they_are() -> None:
    run, counter = compiled(lambda x, f, g: x * _note(f, ("constant", ("more", g))))
    _given.clear()
    wrapped = torch.compile(_one, backend="eager")
    pairs = [(_one, _other), (_other, _one), (wrapped, torch.compile(_one, backend="eager"))]
    for pair in pairs * 2:
        run(torch.ones(2), *pair)
    assert counter.frame_count == 3
    assert [(f, rest[1][1]) for f, rest in _given] == pairs


def test_an_operator_calls_the_function_that_it_holds() -> None:
    operator = ops.enter.default
    held, calls = operator._op, []
    operator._op = lambda *args: calls.append(args)
    try:
        operator(torch.zeros(0))
    finally:
        operator._op = held
    assert len(calls) == 1


def test_a_kernel_can_be_lifted_above_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert not (x * 2).requires_grad
        with torch_private.above_autograd():
            assert (x * 2).requires_grad
        assert not (x * 2).requires_grad


def test_leaves_of_a_traced_backward_are_collected_with_their_gradients() -> None:
    def step(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        torch_private.collected.leaves, torch_private.collected.gradients = [], found
        torch_private.collected.active = True
        with torch_private.TRACING_BACKWARD:
            (x * 3).sum().backward()
        torch_private.collected.active = False
        return found[0]

    x = torch.ones(2, requires_grad=True)
    torch.testing.assert_close(compiled(step)[0](x), torch.full((2,), 3.0))
    assert x.grad is None


_inside: list[bool] = []


@torch.compiler.assume_constant_result
def _look_at_graph(*tensors: Tensor) -> bool:
    raise AssertionError("Dynamo calls what looks at the fake tensors instead")


def _note_inside(fakes: list[Tensor]) -> bool:
    _inside.append(torch_private.graph_is_inside(fakes))
    return _inside[-1] or torch_private.may_break_graph()


torch_private.look_at_tensors(_look_at_graph, _note_inside)


def test_fakes_know_what_of_their_graph_was_traced_and_a_leaf_is_guarded() -> None:
    def ask(x: Tensor, y: Tensor) -> bool:
        return _look_at_graph((x.sin() * y).sum())

    def of(y: Tensor) -> bool:
        _inside.clear()
        told: bool = run(torch.ones(2), y)
        return told

    leaf = torch.ones(2, requires_grad=True)
    run = torch.compile(ask, backend="eager", fullgraph=True)
    assert of(leaf)
    assert of(torch.zeros(2, requires_grad=True))
    assert _inside == [], "the first graph serves again"
    assert not of(leaf * 2)
    torch._dynamo.reset()
    assert not of((leaf * 2)[:])
    torch._dynamo.reset()
    run = torch.compile(ask, backend="eager")
    assert of(leaf * 2), "the graph may break"


_by_engine: list[bool] = []


@torch.library.custom_op("telegrad_tests::note_engine", mutates_args=())
def _note_engine(x: Tensor) -> Tensor:
    _by_engine.append(torch_private.differentiated_by_engine())
    return x.clone()


@_note_engine.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_what_was_differentiated_when_it_was_compiled_runs_without_grad_mode(
    needs_gradient: bool,
) -> None:
    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return _note_engine(x.detach()) + (x if needs_gradient else x.detach())

    _by_engine.clear()
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                torch.compile(step, backend=backend, fullgraph=True)(torch.ones(2).requires_grad_())
    assert _by_engine == [True, True, False, False, False, False]


@constant_of_graph
def _is_handled() -> bool:
    return torch_private.handles_errors(("torch",))


def _asking() -> bool:
    return _is_handled()


def test_a_trace_knows_try_blocks_around_it_from_with_blocks() -> None:
    def ask(x: Tensor) -> tuple[list[bool], Tensor]:
        found = [_asking()]
        with torch.no_grad():
            found.append(_asking())
        try:
            found.append(_asking())
            with torch.no_grad(), torch.enable_grad():
                found.append(_asking())
        except LookupError:
            x = x + 1
        finally:
            x = x + 2
        found.append(_asking())
        return found, x + 1

    found, _ = compiled(ask)[0](torch.ones(2))
    assert found == [False, False, True, True, False]


_codes: list[CodeType | None] = []


@constant_of_graph
def _note_code() -> int:
    _codes.append(torch_private.code_being_traced())
    return 1


def test_the_code_that_is_traced_is_known_and_its_graphs_can_be_forgotten() -> None:
    def inner(x: Tensor) -> Tensor:
        return x * _note_code()

    def outer(x: Tensor) -> Tensor:
        return inner(x) + 1

    _codes.clear()
    run, counter = compiled(outer)
    for _ in range(2):
        run(torch.ones(2))
    assert counter.frame_count == 1
    torch_private.forget_graphs(outer.__code__)
    run(torch.ones(2))
    assert counter.frame_count == 2
    _note_code()
    assert _codes == [outer.__code__, outer.__code__, None]


class _Special(LookupError):
    pass


@constant_of_graph
def _fail() -> int:
    raise _Special("with", "two arguments")


def test_assertions_pass_through_dynamo() -> None:
    def call(x: Tensor) -> Tensor:
        return x * _fail()

    with pytest.raises(_Special) as caught:
        compiled(call)[0](torch.ones(2))
    assert caught.value.args[1] == "two arguments"
    with pytest.raises(_Special) as caught:
        _fail()
    assert type(caught.value) is _Special


_seen: list[list[Tensor]] = []
_names: dict[int, list[str]] = {}


@torch.library.custom_op("telegrad_tests::look", mutates_args=())
def _look(x: Tensor) -> Tensor:
    _seen.append(torch_private.arguments_in(threading.get_ident(), _names))
    return x.clone()


@_look.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_arguments_are_found_in_the_frame_of_a_compiled_function(backend: str) -> None:
    notes: list[tuple[list[Tensor], CodeType, list[str]]] = []

    @constant_of_graph
    def note() -> int:
        torch_private.once_traced(lambda *told: notes.append(told))
        return 1

    def function(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        return _look(x * note()) + given["y"] + there

    there, x, y = torch.ones(2), torch.ones(2), torch.ones(2)
    run = torch.compile(function, backend=backend, fullgraph=True)
    run(x, {"y": y})
    ((before, code, names),) = notes
    assert code is function.__code__
    assert any(tensor is there for tensor in before)
    _names[id(code)] = names
    _seen.clear()
    z = torch.ones(2)
    run(z, {"y": y})
    _names.clear()
    assert {id(tensor) for tensor in _seen[0]} == {id(z), id(y)}


def test_a_guard_by_identity_ends_with_its_object() -> None:
    run, counter = compiled(lambda x: x + 1 if sites.eras.roll is sites.NEVER else x + 2)
    for count in range(1, 6):
        run(torch.ones(2))
        assert counter.frame_count == count
        sites._begin_roll()
        gc.collect()
        # Another object may be where the last one was.
        sites._begin_roll()


def test_zeros_of_two_signs_are_two_constants() -> None:
    run, counter = compiled(lambda x, numbers: torch.copysign(x, torch.tensor(numbers[0])))
    for number in (0.0, -0.0, 0.0, -0.0):
        assert bool(run(torch.ones(1), [number]) < 0) is (str(number) == "-0.0")
    assert counter.frame_count == 2


def test_torch_keeps_a_record_of_opaque_types() -> None:
    torch_private.Opaque(dist.ProcessGroup)
    with pytest.raises(ImportError, match="does not know Tensor as an opaque type"):
        torch_private.Opaque(Tensor)


def test_a_compiled_function_knows_the_one_that_it_was_made_from() -> None:
    def plain(x: Tensor) -> Tensor:
        return x

    assert torch_private.as_written(torch.compile(torch.compile(plain))) is plain
