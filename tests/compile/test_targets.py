"""What a compiled function can call elsewhere, and what it hears of a worker that is gone."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from tests.compile import functions as f
from tests.compile.checks import assert_same, compiled, differentiated
from tests.scripts import run_script


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def times(self, x: Tensor) -> Tensor:
        return x * self.by

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.by

    def __repr__(self) -> str:
        return "a scale"

    @classmethod
    def seven(cls, x: Tensor) -> Tensor:
        return x * 7


@dataclass
class Shift:
    """It is compared by what it holds, so it has no hash."""

    by: float

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.by


class Odd(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "is odd", name)
        self.name = name


def _is_odd(x: Tensor) -> None:
    raise Odd("three")


def _is_no_text(x: Tensor) -> str:
    return b"\xff".decode()


def _in_a_graph(function: Any, x: Tensor) -> Any:
    run, _ = compiled(lambda x: rpc.rpc_sync("worker2", function, (x,)), "eager")
    return run(x)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


SCALE = Scale(3.0)
WEIGHTED = Weighted()
PARTIAL = functools.partial(torch.mul, WEIGHTED.weight)


@pytest.mark.usefixtures("job")
def test_methods_and_objects_are_called_as_in_eager_mode() -> None:
    def step(x: Tensor) -> Tensor:
        later = rpc.rpc_async("worker2", Scale.seven, (x,))
        y = rpc.rpc_sync("worker1", SCALE.times, (x,)) + rpc.rpc_sync("worker1", SCALE, (x,))
        return (y * later.wait() * rpc.remote("worker1", SCALE.times, (x,)).to_here()).sum()

    run, counter = compiled(step, "aot_eager")
    x = torch.randn(3, requires_grad=True)
    assert_same(differentiated(step, x), differentiated(run, x))
    SCALE.by = 2.0
    assert_same(differentiated(step, x), differentiated(run, x))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("job")
def test_objects_that_look_the_same_are_two() -> None:
    run, _ = compiled(lambda x, scale: rpc.rpc_sync("worker1", scale.times, (x,)), "aot_eager")
    scales = [Scale(2.0), Scale(3.0)]
    for scale in scales * 2:
        torch.testing.assert_close(run(torch.ones(2), scale), torch.full((2,), scale.by))


@pytest.mark.usefixtures("job")
def test_an_object_that_has_no_hash_is_called() -> None:
    run, _ = compiled(lambda x, shift: rpc.rpc_sync("worker1", shift, (x,)), "aot_eager")
    shifts = [Shift(2.0), Shift(3.0)]
    for shift in shifts * 2:
        torch.testing.assert_close(run(torch.zeros(2), shift), torch.full((2,), shift.by))


@torch.no_grad()
def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.no_grad()
def tripled(x: Tensor) -> Tensor:
    return x * 3


def _times(by: float) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(x: Tensor) -> Tensor:
            result: Tensor = function(x) * by
            return result

        return wrapped

    return decorate


@_times(10)
def ten(x: Tensor) -> Tensor:
    return x


@_times(100)
def hundred(x: Tensor) -> Tensor:
    return x


@torch.compile(backend="eager")
def compiled_double(x: Tensor) -> Tensor:
    return x * 2


@torch.compile(backend="eager")
def compiled_triple(x: Tensor) -> Tensor:
    return x * 3


@functools.lru_cache
def cached(x: Tensor) -> Tensor:
    return x * 4


def apply(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x)


def multiplied(x: Tensor, by: float) -> Tensor:
    return x * by


class Target:
    """Functions that are given as an attribute."""

    function: Any = None


target = Target()


def _as_global(x: Tensor, function: Any) -> Any:
    return rpc.rpc_sync("worker1", target.function, (x,))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "functions",
    [
        (doubled, tripled),
        (ten, hundred),
        (torch.Tensor.neg, torch.Tensor.abs),
        (torch.Tensor.neg, doubled, torch.sin),
        (torch.Tensor.__neg__, torch.Tensor.__abs__),
        (compiled_double, compiled_triple, cached),
        (functools.partial(multiplied, by=2.0), functools.partial(multiplied, by=3.0)),
        (functools.partial(apply, doubled), functools.partial(apply, tripled)),
    ],
    ids=["no_grad", "wraps", "methods", "mixed", "slots", "compiled", "partial", "of functions"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, function: rpc.rpc_sync("worker1", function, (x,)),
        lambda x, function: rpc.rpc_async("worker1", function, (x,)).wait(),
        lambda x, function: rpc.remote("worker1", function, (x,)).to_here(),
        lambda x, function: rpc.rpc_sync("worker1", apply, (function, x)),
        _as_global,
    ],
    ids=["rpc_sync", "rpc_async", "remote", "as argument", "as attribute"],
)
def test_another_function_is_noticed_and_the_same_one_is_not_compiled_again(
    call: Any, functions: tuple[Any, ...]
) -> None:
    run, counter = compiled(call, "eager")
    x = torch.full((2,), 5.0)
    for function in functions * 2:
        target.function = function
        torch.testing.assert_close(run(x, function), function(x))
    assert counter.frame_count == len(functions)


@pytest.mark.usefixtures("job")
def test_an_object_that_was_called_is_not_kept() -> None:
    run, _ = compiled(lambda x, function: rpc.rpc_sync("worker1", function, (x,)), "eager")
    scale = Scale(2.0)
    gone = weakref.ref(scale)
    run(torch.ones(2), scale)
    run(torch.ones(2), scale.times)
    del scale
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("job")
def test_the_method_of_a_tensor_is_the_one_of_that_tensor() -> None:
    run, counter = compiled(lambda x, f: rpc.rpc_sync("worker1", f, (x,)), "eager")
    one, two = torch.ones(3), torch.full((3,), 2.0)
    x = torch.full((3,), 5.0)
    for tensor, name in [(one, "add"), (one, "mul"), (two, "add")] * 2:
        method = getattr(tensor, name)
        torch.testing.assert_close(run(x, method), method(x))
    assert counter.frame_count == 3


@pytest.mark.usefixtures("job")
def test_the_arguments_of_a_partial_get_their_gradients() -> None:
    def step(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", PARTIAL, (x,)).pow(2).sum()

    for function in (step, compiled(step, "aot_eager")[0]):
        with autograd.context() as context_id:
            autograd.backward(context_id, [function(torch.full((3,), 2.0))])
            found = autograd.get_gradients(context_id)[WEIGHTED.weight]
            torch.testing.assert_close(found, torch.full((3,), 8.0))


def _made_inside(x: Tensor) -> Any:
    return rpc.rpc_sync("worker1", Scale(2.0).times, (x,))


def _method_of_a_tensor(x: Tensor) -> Any:
    return rpc.rpc_sync("worker1", x.add, (x,))


def _object_as_argument(x: Tensor) -> Any:
    return rpc.rpc_sync("worker1", Scale.times, (SCALE, x))


def _with_parameters(x: Tensor) -> Any:
    return rpc.rpc_sync("worker1", WEIGHTED, (x,))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (_made_inside, "must exist before"),
        (_method_of_a_tensor, "must exist before"),
        (_object_as_argument, "must exist before"),
        (_with_parameters, "Make a RemoteModule of it"),
    ],
)
def test_what_cannot_be_called_is_a_sentence(function: Any, sentence: str) -> None:
    with pytest.raises(rpc.TelegradError, match=sentence):
        compiled(function, "aot_eager")[0](torch.ones(3))


@pytest.mark.usefixtures("job")
def test_errors_of_a_first_call_have_the_types_of_eager_mode() -> None:
    def fails(x: Tensor, to: str) -> Any:
        return rpc.rpc_sync(to, f.layer, (x, x[0]))

    run, _ = compiled(fails, "aot_eager")
    with pytest.raises(rpc.UnknownWorker, match="'nobody'"):
        run(torch.ones(2, 3), "nobody")
    with pytest.raises(RuntimeError, match="same reduction dim"):
        run(torch.ones(2, 2), "worker1")
    run_name, _ = compiled(lambda x: rpc.rpc_sync("worker1", "layer", (x,)), "aot_eager")
    with pytest.raises(TypeError, match="not its name"):
        run_name(torch.ones(2))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("function", "cls"), [(_is_odd, Odd), (_is_no_text, UnicodeDecodeError)])
def test_errors_of_a_first_call_are_whole_here_and_where_they_are_sent(
    function: Any, cls: type[Exception]
) -> None:
    x = torch.ones(2)
    with pytest.raises(cls) as eager:
        rpc.rpc_sync("worker2", function, (x,))
    with pytest.raises(cls) as here:
        _in_a_graph(function, x)
    with pytest.raises(cls) as sent:
        rpc.rpc_sync("worker1", _in_a_graph, (function, x))
    assert str(eager.value) == str(here.value) == str(sent.value)
    assert sent.type is cls
    assert vars(eager.value) == vars(sent.value)


LOST = """
import os, threading, torch, telegrad
from telegrad import autograd, rpc
from telegrad.rpc import WorkerLost

class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        os._exit(3)

def doubled(x):
    return x * 2

def dies_in_forward(x):
    if type(x) is torch.Tensor:
        os._exit(3)
    return x * 2

def dies_in_backward(x):
    return Dies.apply(x) if type(x) is torch.Tensor else x * 2

def step(x, to, function):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(to, function, (x,)).sum()
        autograd.backward(context_id, [loss])
    return loss.detach()

def lost(run, *args):
    try:
        run(torch.ones(2, requires_grad=True), *args)
    except WorkerLost as error:
        print(error.worker if hasattr(error, "worker") else "lost")
    else:
        print("nothing was raised")

def first_of_all():
    # What telegrad guards is guarded also in the trace in which its guards are loaded.
    local = torch.nn.Linear(2, 2)
    def call(x):
        return rpc.rpc_sync("c", doubled, (local(x),))
    run = torch.compile(call, backend="eager", fullgraph=True)
    run(torch.ones(2))
    local.register_forward_hook(lambda module, inputs, output: output * 3)
    torch.testing.assert_close(run(torch.ones(2)), call(torch.ones(2)))

def main():
    first_of_all()
    run = torch.compile(step, backend="aot_eager", fullgraph=True)
    run(torch.ones(2, requires_grad=True), "b", doubled)
    lost(run, "a", dies_in_forward)
    lost(run, "b", dies_in_backward)
    torch._dynamo.reset()
    lost(run, "a", doubled)
    lost(run, "b", doubled)
    made = torch.compile(lambda x: rpc.remote("a", doubled, (x,)), backend="eager", fullgraph=True)
    lost(made)
    rpc.rpc_sync("c", doubled, (torch.ones(2),))
    found = run(torch.ones(2, requires_grad=True), "c", doubled)
    torch.testing.assert_close(found, torch.tensor(4.0))
    assert not autograd.api.autograd_of().container

if __name__ == "__main__":
    telegrad.run(main, workers=["a", "b", "c"])
"""


def test_a_worker_that_is_lost_is_told_as_in_eager_mode(tmp_path: Any) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    ran = run_script(script)
    assert ran.stdout.split() == ["a", "b", "a", "b", "a"], ran.stderr
    assert ran.returncode == 0, ran.stderr
