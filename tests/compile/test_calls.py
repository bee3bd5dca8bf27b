"""Remote calls as nodes of one graph: results, gradients and effects as in eager mode."""

from __future__ import annotations

import enum
import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd import AutogradError
from telegrad.autograd.backward import Post
from telegrad.autograd.context import Context
from telegrad.autograd.events import Stalled
from telegrad.autograd.service import Autograd
from telegrad.compile import calls
from tests.compile import functions as f
from tests.compile.checks import BACKENDS, assert_same, compiled, differentiated

pytestmark = pytest.mark.usefixtures("job")


class _Plain:
    pass


UNSENDABLE = _Plain()


def needs(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("backend", ["eager", *BACKENDS[1:]])
def test_calls_compile_as_one_graph_with_the_gradients_of_eager_mode(backend: str) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        h = rpc.rpc_sync("worker1", f.layer, args=(x.sin(), y))
        later = rpc.rpc_async("worker2", f.layer, args=(h, y * 2))
        arguments = {"x": h, "rest": [y, 3]}
        a, b = rpc.rpc_sync("worker2", f.several, args=(arguments,), kwargs={"scale": 2.0})
        assert b["nothing"] is None
        picked = a.gather(1, b["where"][:, None])
        return (later.wait() * h).tanh().sum() + (a * b["sum"][0]).sum() + picked.sum()

    x, y = needs(4, 3), needs(4, 3)
    expected = differentiated(step, x, y)
    fast, counter = compiled(step, backend)
    for _ in range(3):
        assert_same(expected, differentiated(fast, x, y))
    assert counter.frame_count == 1, "a new context must not cause a recompilation"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_remote_parameter_gets_its_gradient_when_no_argument_needs_one(backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.layer, (x, x)).pow(2).sum()

    x = torch.randn(4, 3)
    expected = differentiated(step, x)
    assert expected[-2] is not None
    assert_same(expected, differentiated(compiled(step, backend)[0], x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_changing_sizes_and_the_owner_is_asked_by_kind(backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.halves, (x,)) * 3

    fast, counter = compiled(step, backend)
    for rows in (6, 8, 10, 12, 14):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(fast(x), x[: rows // 2] * 6)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("function", [f.padded, f.cut, f.resized])
def test_operators_that_want_numbers_for_sizes_serve_changing_ones(
    function: Callable[[Tensor], Tensor],
) -> None:
    fast, counter = compiled(lambda x: rpc.rpc_sync("worker1", function, (x,)), "aot_eager")
    for rows in (4, 6, 8, 10):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(fast(x), function(x))
    assert counter.frame_count <= 2


class _Row(list[int]):
    pass


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    "make",
    [
        lambda n: OrderedDict(b=n, a=2),
        lambda n: defaultdict(int, a=n),
        lambda n: torch.Size([n, 2]),
        lambda n: f.Pair(n, 2),
        lambda n: [(n, None), {"a": Color.RED}],
        lambda n: Color(n),
    ],
    ids=["OrderedDict", "defaultdict", "Size", "namedtuple", "nested", "enum"],
)
def test_an_argument_arrives_with_its_type(make: Callable[[int], Any]) -> None:
    run, _ = compiled(lambda x, given: rpc.rpc_sync("worker1", f.told_type, (x, given)), "eager")
    for number in (3, 3):
        given = make(number)
        run(torch.ones(2), given)
        said = rpc.rpc_sync("worker1", f.take_log)
        assert said == [f"{type(given).__name__} {given!r}"]


def test_containers_of_other_types_are_refused_and_shapes_and_pairs_are_not() -> None:
    run, _ = compiled(lambda x, given: rpc.rpc_sync("worker1", f.told_type, (x, given)), "eager")
    for given in (_Row([1, 2]), deque([1, 2], maxlen=2)):
        with pytest.raises(TypeError, match=f"is given a {type(given).__name__}"):
            run(torch.ones(2), given)

    def step(x: Tensor) -> Tensor:
        told = rpc.rpc_sync("worker1", f.told_type, (x, x.shape))
        return rpc.rpc_sync("worker1", f.difference, (f.Pair(told * x, x),)).sum()

    fast, _ = compiled(step, "aot_eager")
    for rows in (4, 5, 6):
        x = needs(rows, 3)
        expected, got = differentiated(step, x), differentiated(fast, x)
        assert_same(expected, got)
        said = rpc.rpc_sync("worker1", f.take_log)
        assert said == [f"Size torch.Size([{rows}, 3])"] * 2


def test_a_bool_that_is_computed_from_a_size_is_a_constant() -> None:
    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.told_type, (x, x.shape[0] > 4))

    run, _ = compiled(step, "aot_eager")
    for rows in (3, 4, 5, 6):
        run(torch.ones(rows))
        assert rpc.rpc_sync("worker1", f.take_log) == [f"bool {rows > 4}"]


def test_arguments_that_are_no_tuple_are_refused_as_in_eager_mode() -> None:
    def with_args(x: Tensor) -> Any:
        return rpc.rpc_sync("worker1", f.halves, x)  # type: ignore[arg-type]

    def with_kwargs(x: Tensor) -> Any:
        return rpc.rpc_sync("worker1", f.halves, (x,), [1])  # type: ignore[arg-type]

    for call, sentence in ((with_args, "args is a Tensor"), (with_kwargs, "kwargs is a list")):
        for function in (call, compiled(call, "eager")[0]):
            with pytest.raises(TypeError, match=sentence):
                function(torch.ones(2))


def test_a_guard_of_the_owner_causes_a_recompilation_when_it_breaks() -> None:
    fast, _ = compiled(lambda x, n: rpc.rpc_sync("worker1", f.parts, (x, n)), "aot_eager")
    for rows, count in ((6, 2), (6, 3), (8, 2), (7, 2)):
        x = torch.randn(rows, 2)
        for part, expected in zip(fast(x, count), x.chunk(count), strict=True):
            torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_twice_in_a_call_is_one_tensor_there(backend: str) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        h = x.sin()
        return rpc.rpc_sync("worker1", f.doubled_in_place, (h, [h], y)).pow(2).sum()

    x, y = needs(4, 3), needs(4, 3)
    expected = differentiated(step, x, y)
    assert_same(expected, differentiated(compiled(step, backend)[0], x, y))


def test_a_float_or_a_timeout_that_changes_is_a_constant_of_another_graph() -> None:
    def step(x: Tensor, by: float, timeout: float) -> Tensor:
        nested = {"x": x, "rest": (x, 2)}
        return rpc.rpc_sync("worker1", f.several, (nested,), {"scale": by}, timeout=timeout)[0]

    fast, _ = compiled(step, "aot_eager")
    x = torch.ones(2, 3)
    for by, timeout in ((1.5, 20), (2.5, 21), (3.5, 22), (3.5, 20.5), (3.5, 21.5), (4, 22.5)):
        torch.testing.assert_close(fast(x, by, timeout), step(x, by, timeout))


def test_two_arguments_that_became_one_object_are_noticed() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.doubled_in_place, (x, [y], x))

    fast, _ = compiled(step, "aot_eager")
    one, other = torch.ones(4, 3), torch.ones(4, 3)
    for x, y in ((one, other), (one, one), (one, other)):
        torch.testing.assert_close(fast(x, y), step(x, y))


def test_sizes_that_depend_on_data_are_known_at_run_time() -> None:
    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.positive, (x,)).pow(2).sum()

    fast, _ = compiled(step, "aot_eager")
    for _ in range(2):
        x = needs(9)
        assert_same(differentiated(step, x), differentiated(fast, x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_such_sizes_is_contiguous(backend: str) -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.places, (x,)), backend)
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    found = fast(x)
    torch.testing.assert_close(found, x.nonzero())
    assert found.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_effects_are_neither_dropped_nor_merged_nor_reordered(backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        rpc.rpc_sync("worker1", f.say, (x, "unused"))
        a = rpc.rpc_sync("worker1", f.say, (x, "twice"))
        b = rpc.rpc_sync("worker1", f.say, (x, "twice"))
        rpc.rpc_sync("worker1", f.say, (x, "last"))
        return a + b

    fast, _ = compiled(step, backend)
    fast(torch.ones(3))
    assert rpc.rpc_sync("worker1", f.take_log) == ["unused", "twice", "twice", "last"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_independent_calls_are_under_way_at_the_same_time(backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        a = rpc.rpc_async("worker1", f.meet, (x,))
        b = rpc.rpc_async("worker1", f.meet, (x + 1,))
        return a.wait() + b.wait()

    torch.testing.assert_close(compiled(step, backend)[0](torch.ones(3)), torch.full((3,), 6.0))


def test_calls_without_grad_are_not_recorded() -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.layer, (x, x)), "aot_eager")
    with autograd.context() as context_id, torch.no_grad():
        out = fast(needs(4, 3))
        assert not out.requires_grad
        assert not autograd.retrieve_context(context_id).sends


def test_an_error_of_the_remote_function_has_its_own_type() -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.fail, (x,)) + 1, "aot_eager")
    with pytest.raises(ValueError, match="the remote function failed"):
        fast(torch.ones(2))


def test_backward_says_what_is_wrong_without_a_context_and_outside_of_a_pass() -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.layer, (x, x)).sum(), "aot_eager")
    with pytest.raises(AutogradError, match="outside of an autograd context"):
        fast(needs(4, 3)).backward()
    with autograd.context(), pytest.raises(AutogradError, match=r"instead of loss\.backward"):
        fast(needs(4, 3)).backward()


def test_what_cannot_be_part_of_a_graph_is_named() -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.number, (x,)), "aot_eager")
    with pytest.raises(Exception, match="returns a float, which cannot be part of a compiled"):
        fast(torch.ones(2))
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.say, (x, UNSENDABLE)), "aot_eager")
    with pytest.raises(Exception, match="takes tensors, numbers, strings"):
        fast(torch.ones(2))

    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.with_a_number, (x,)), "aot_eager")
    with pytest.raises(Exception, match=r"tuple with a float at \[1\]\['rest'\]\[1\], which"):
        fast(torch.ones(2))


@pytest.mark.parametrize("function", [f.branching, f.by_numpy])
def test_a_function_that_asks_for_data_is_named_with_the_way_out(function: Any) -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", function, (x,)), "eager")
    with pytest.raises(rpc.TelegradError, match=r"functions\.b.* 'worker1'.*declare_fake") as told:
        fast(torch.ones(2))
    assert told.value.__cause__ is not None


def test_calls_that_a_remote_function_makes_are_inferred_and_not_made() -> None:
    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.nested, ("worker2", x)).sum()

    x = needs(4, 3)
    expected = differentiated(step, x)
    rpc.rpc_sync("worker2", f.take_log)
    assert_same(expected, differentiated(compiled(step, "aot_eager")[0], x))
    assert rpc.rpc_sync("worker2", f.take_log) == ["layer"]


def test_an_eager_send_that_was_made_later_does_not_hold_up_a_compiled_function() -> None:
    """The compiled node must not wait for a gradient that a later send on this worker brings."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        reference = make(x)
        seen = reference.to_here()
        return rpc.rpc_sync("worker2", f.layer, (seen * 2, seen)).sum() + local(y)

    make, _ = compiled(lambda x: rpc.remote("worker1", f.layer, (x * 2, x)), "aot_eager")
    local, _ = compiled(lambda y: y.pow(2).sum(), "aot_eager")
    x, y = needs(4, 3), needs(3)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        seen = rpc.rpc_sync("worker1", f.layer, (x * 2, x))
        return rpc.rpc_sync("worker2", f.layer, (seen * 2, seen)).sum() + y.pow(2).sum()

    assert_same(differentiated(plain, x, y), differentiated(step, x, y))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_who_reads_an_answer_in_a_node_sees_what_others_bring_meanwhile(
    monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    ask = Autograd.ask

    def ask_and_hear_from_another(
        self: Autograd, context: Context, pass_id: int, post: Post
    ) -> Any:
        pending = ask(self, context, pass_id, post)
        context.participants[pass_id].deliver(self.node.info.id, Stalled())
        return pending

    def step(x: Tensor, context_id: int) -> Tensor:
        seen = rpc.rpc_sync("worker1", f.layer, (x * 2, x))
        loss = rpc.rpc_sync("worker2", f.layer, (seen * 2, seen)).sum()
        if inside:
            autograd.backward(context_id, [loss], timeout=20)
            return loss.detach()
        return loss

    x = needs(4, 3)
    (expected,) = torch.autograd.grad(f.layer(f.layer(x * 2, x) * 2, f.layer(x * 2, x)).sum(), x)
    run, _ = compiled(step, "aot_eager")
    monkeypatch.setattr(Autograd, "ask", ask_and_hear_from_another)
    with autograd.context() as context_id:
        loss = run(x, context_id)
        if not inside:
            autograd.backward(context_id, [loss], timeout=20)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_pass_through_a_graph_asks_each_worker_once_and_says_nothing_else(
    monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    told: list[tuple[str, int]] = []

    def counted(name: str) -> None:
        method = getattr(Autograd, name)

        def count(self: Autograd, context: Context, pass_id: int, post: Post) -> object:
            told.append((name, post.to))
            return method(self, context, pass_id, post)

        monkeypatch.setattr(Autograd, name, count)

    def step(x: Tensor, context_id: int) -> Tensor:
        seen = rpc.rpc_sync("worker1", f.layer, (x * 2, x))
        loss = rpc.rpc_sync("worker2", f.layer, (seen * 2, x)).sum()
        if inside:
            autograd.backward(context_id, [loss], timeout=20)
            return loss.detach()
        return loss

    counted("ask")
    counted("post")
    run, _ = compiled(step, "aot_eager")
    with autograd.context() as context_id:
        loss = run(needs(4, 3), context_id)
        if not inside:
            autograd.backward(context_id, [loss], timeout=20)
    assert told == [("ask", 2), ("ask", 1)]


def test_a_profiler_sees_the_calls_of_a_graph() -> None:
    run, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.layer, (x, x)), "aot_eager")
    x = torch.randn(4, 3)
    run(x)
    with torch.profiler.profile() as profile:
        run(x)
    assert "telegrad::call" in {event.key for event in profile.key_averages()}


def test_the_records_of_calls_go_with_their_graphs() -> None:
    fast, _ = compiled(lambda x: rpc.rpc_sync("worker1", f.layer, (x, x)).sum(), "aot_eager")
    differentiated(fast, needs(4, 3))
    gc.collect()
    assert calls.live_records() == 0


def caught(x: Tensor) -> Tensor:
    try:
        return rpc.rpc_sync("worker1", f.fail, (x + 1,))
    except ValueError:
        return rpc.rpc_sync("worker1", f.say, (x, "handler"))


def caught_around(x: Tensor) -> Tensor:
    y = x * 2
    try:
        with torch.no_grad():
            return failing(y)
    except ValueError:
        return y * 5


def failing(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker1", f.fail, (x,))


def caught_within(x: Tensor) -> Tensor:
    return caught(x * 3) + 1


def caught_while_waiting(x: Tensor) -> Tensor:
    future = rpc.rpc_async("worker1", f.fail, (x,))
    try:
        return future.wait()
    except ValueError:
        return x * 7


def caught_at_first(x: Tensor) -> Tensor:
    try:
        return rpc.rpc_sync("nobody", f.say, (x, "hello"))
    except rpc.TelegradError:
        return x * 9


@pytest.mark.parametrize(
    "function", [caught, caught_around, caught_within, caught_while_waiting, caught_at_first]
)
def test_errors_of_calls_are_caught_in_the_compiled_function(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.ones(3)
    run = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(run(x), function(x))
    torch._dynamo.reset()
    with pytest.raises(rpc.TelegradError, match="in a try block of a compiled function"):
        compiled(function, "aot_eager")[0](x)


def test_a_call_in_a_finally_block_is_made_when_a_call_fails() -> None:
    def function(x: Tensor) -> Tensor:
        try:
            return rpc.rpc_sync("worker1", f.fail, (x,))
        finally:
            rpc.rpc_sync("worker1", f.say, (x, "at last"))

    with pytest.raises(ValueError, match="the remote function failed"):
        torch.compile(function, backend="aot_eager")(torch.ones(3))
    assert "at last" in rpc.rpc_sync("worker1", f.take_log)
