"""A RemoteSequential is an nn.Sequential, wherever its modules live."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from telegrad import autograd, checkpoint, rpc
from telegrad.nn import RemoteModule, RemoteSequential
from telegrad.nn.remote_sequential import _longest
from telegrad.optim import DistributedOptimizer
from tests.nn import modules
from tests.rpc.inside import when_settled

WORKERS = ("worker1", "worker2")
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _nothing_is_left(workers: Any) -> Iterator[None]:
    yield
    for worker in ("main", *WORKERS):
        assert when_settled(partial(is_rid, worker)), (worker, kept_by(worker))


def is_rid(worker: str) -> bool:
    return kept_by(worker) == (0, 0)


def kept_by(worker: str) -> tuple[int, int]:
    found: tuple[int, int] = rpc.rpc_sync(worker, modules.relays_kept)
    return found


def both(places: str, makes: list[Make]) -> tuple[nn.Sequential, RemoteSequential]:
    """The same modules in one process, and each at its place: a worker by its number, "m" for a
    RemoteModule on this worker, "-" for a local module."""
    names = {"1": "worker1", "2": "worker2", "m": "main"}
    spread = [
        make() if place == "-" else RemoteModule(names[place], make)
        for place, make in zip(places, makes, strict=True)
    ]
    return nn.Sequential(*[make() for make in makes]), RemoteSequential(*spread)


def layers(places: str) -> tuple[nn.Sequential, RemoteSequential]:
    return both(places, [partial(modules.linear, 4, 4, seed) for seed in range(len(places))])


def x() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(11))


def gradients_of(module: nn.Module, context_id: int) -> list[Tensor | None]:
    found = autograd.get_gradients(context_id)
    return [found.get(p) for p in module.parameters()]


def gradients_in(model: nn.Sequential, context_id: int) -> list[Tensor | None]:
    return [
        gradient
        for module in model
        for gradient in (
            module.run(gradients_of, context_id)
            if isinstance(module, RemoteModule)
            else gradients_of(module, context_id)
        )
    ]


def check(local: nn.Sequential, spread: RemoteSequential, mode: str = "smart") -> None:
    """Outputs and gradients are those of one process."""
    here, there = x().requires_grad_(), x().requires_grad_()
    expected = local(here)
    expected.square().sum().backward()
    with autograd.context() as context_id:
        found = spread(there)
        torch.testing.assert_close(found, expected)
        autograd.backward(context_id, [found.square().sum()], mode=mode)
        torch.testing.assert_close(autograd.get_gradients(context_id).get(there), here.grad)
        torch.testing.assert_close(
            gradients_in(spread, context_id), [p.grad for p in local.parameters()]
        )


PLACES = [
    "12", "11", "121", "1122", "2112", "-12", "12-", "1-2", "12-21", "-1-22-", "1", "-", "m1",
    "1m2", "12m", "m", "mm",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("places", PLACES)
def test_values_and_gradients_are_those_of_one_process(places: str, mode: str) -> None:
    check(*layers(places), mode)


def test_without_modules_it_gives_what_it_is_given() -> None:
    given = x()
    assert RemoteSequential()(given) is given


@pytest.mark.parametrize("places", ["12", "11", "-1", "1-", "121"])
@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "named"])
def test_a_container_is_passed_on_as_one_argument(kind: str, places: str) -> None:
    makes: list[Make] = [partial(modules.Split, kind), modules.Joined]
    if len(places) == 3:
        makes.append(partial(modules.linear, 4, 4, 1))
    check(*both(places, makes))


@pytest.mark.parametrize("places", ["12", "1122", "21"])
def test_a_container_may_be_what_comes_back(places: str) -> None:
    makes: list[Make] = [nn.Identity] * (len(places) - 1)
    _, spread = both(places, [*makes, partial(modules.Split, "dict")])
    expected = modules.Split("dict")(x())
    with autograd.context():
        torch.testing.assert_close(spread(x()), expected)


@pytest.mark.parametrize("places", ["12", "11", "112", "122"])
def test_modules_may_change_their_input_or_give_it_back(places: str) -> None:
    shift = partial(modules.linear, 4, 6, 2)
    makes: list[Make] = [shift, modules.InPlace, nn.Identity][: len(places)]
    check(*both(places, makes))


@pytest.mark.parametrize("places", ["12", "11"])
def test_a_module_may_give_its_own_parameter(places: str) -> None:
    local, spread = both(places, [modules.GivesParameter, partial(modules.linear, 4, 4, 1)])
    local(x()).square().sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [spread(x()).square().sum()])
        found = gradients_in(spread, context_id)
    torch.testing.assert_close(found, [p.grad for p in local.parameters()])


@pytest.mark.parametrize("places", ["12", "21", "11", "121"])
def test_modules_may_be_coroutines(places: str) -> None:
    class Waited(modules.Awaits):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * self.weight

    _, spread = both(places, [modules.Awaits] * len(places))
    check(nn.Sequential(*[Waited() for _ in places]), spread)


@pytest.mark.parametrize("places", ["12", "-12", "1m2"])
def test_outside_of_a_context_nothing_is_recorded(places: str) -> None:
    local, spread = layers(places)
    found = spread(x())
    torch.testing.assert_close(found, local(x()).detach())
    assert not found.requires_grad


def take_modes(worker: str) -> list[bool]:
    found: list[bool] = rpc.rpc_sync(worker, modules.take_seen)
    return found


@pytest.mark.parametrize("recording", [True, False])
def test_grad_mode_of_the_caller_holds_at_all_stages(recording: bool) -> None:
    _, spread = both("12122", [modules.KeepsMode] * 5)
    with autograd.context(), torch.set_grad_enabled(recording):
        assert spread(x().requires_grad_()).requires_grad is recording
    assert take_modes("worker1") == [recording] * 2
    assert take_modes("worker2") == [recording] * 3


def test_in_inference_mode_it_gives_what_can_be_changed_outside_of_it() -> None:
    local, spread = layers("12")
    with autograd.context(), torch.inference_mode():
        found = spread(x())
    torch.testing.assert_close(found.add_(1), local(x()).detach() + 1)


def test_autocast_of_the_caller_holds_at_all_stages() -> None:
    local, spread = layers("121")
    with autograd.context() as context_id, torch.autocast("cpu", dtype=torch.bfloat16):
        found = spread(x())
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, local(x()))
        autograd.backward(context_id, [found.float().sum()])
        assert all(g is not None for g in gradients_in(spread, context_id))


@pytest.mark.parametrize("options", [{"compile": {"backend": "eager"}}, {"device": "/cpu"}])
def test_modules_may_be_compiled_or_have_a_device(options: dict[str, Any]) -> None:
    local, _ = layers("--")
    device = options.pop("device", "")
    spread = RemoteSequential(
        *[
            RemoteModule(worker + device, modules.linear, (4, 4, seed), **options)
            for seed, worker in enumerate(WORKERS)
        ]
    )
    check(local, spread)


def test_gradients_can_be_differentiated_again() -> None:
    local, spread = both("1212", [partial(modules.linear, 4, 4, 1), nn.Tanh] * 2)
    here, there = x().requires_grad_(), x().requires_grad_()
    (first,) = torch.autograd.grad(local(here).square().sum(), here, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), here)
    with autograd.context() as context_id:
        loss = spread(there).square().sum()
        autograd.backward(context_id, [loss], create_graph=True)
        found = autograd.get_gradients(context_id)[there]
        torch.testing.assert_close(found, first)
        autograd.backward(context_id, [found.square().sum()])
        both_passes = autograd.get_gradients(context_id)[there]
    torch.testing.assert_close(both_passes, first + second)


# What goes wrong.


@pytest.mark.parametrize("places", ["121", "111", "m12", "12m"])
@pytest.mark.parametrize("at", range(3))
def test_the_error_of_a_module_is_raised_here(places: str, at: int) -> None:
    makes: list[Make] = [nn.Identity] * 3
    makes[at] = modules.Fails
    _, spread = both(places, makes)
    with autograd.context(), pytest.raises(ArithmeticError, match="no result today") as caught:
        spread(x())
    if places[at] != "m":
        assert f"worker{places[at]}" in str(caught.value.__cause__)
        assert "in forward" in str(caught.value.__cause__)


@pytest.mark.parametrize("at", range(3))
def test_a_result_that_cannot_be_sent_is_told(at: int) -> None:
    makes: list[Make] = [nn.Identity] * 3
    makes[at] = modules.Unsendable
    _, spread = both("121", makes)
    words = f"cannot send .*lock.* in the result of a method on worker 'worker{'121'[at]}'"
    with autograd.context(), pytest.raises(TypeError, match=words):
        spread(x())


@pytest.mark.parametrize("places", ["12", "21", "11"])
def test_a_call_that_takes_too_long_is_given_up(places: str) -> None:
    _, spread = both(places, [modules.WaitsForWord, nn.Identity])
    for module in spread:
        module.timeout = 0.2
    words = "a RemoteSequential of 2 modules"
    with autograd.context(), pytest.raises(rpc.CallTimeout, match=words):
        spread(x())
    rpc.rpc_sync(f"worker{places[0]}", say_go_on)


def say_go_on() -> None:
    modules.words.put("go on")


@pytest.mark.parametrize(
    ("bounds", "of_job", "longest"),
    [
        ((1.0, 2.0), 60.0, 2.0),
        ((None, 2.0), 60.0, 60.0),
        ((None, 600.0), 60.0, 600.0),
        ((None, 600.0), 0.0, 0),
        ((0, 600.0, None), 60.0, 0),
        ((None,), 60.0, 60.0),
    ],
)
def test_the_longest_bound_holds(bounds: Any, of_job: float, longest: float) -> None:
    assert _longest(set(bounds), of_job) == longest


def test_after_an_error_its_context_goes_on() -> None:
    _, bad = both("12", [nn.Identity, modules.Fails])
    local, good = layers("12")
    given, expected = x().requires_grad_(), x().requires_grad_()
    local(expected).sum().backward()
    with autograd.context() as context_id:
        with pytest.raises(ArithmeticError):
            bad(given)
        autograd.backward(context_id, [good(given).sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[given], expected.grad)


# What is more than a call of each module.


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_the_last_module_run_here_and_those_of_others_do_not() -> None:
    local, spread = layers("12")
    seen: list[Any] = []
    spread[0].register_forward_hook(lambda *_: seen.append("first"))
    spread[1].register_forward_hook(lambda module, given, output: seen.append(output))
    spread[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    with autograd.context() as context_id:
        found = spread(x())
        autograd.backward(context_id, [found.sum()])
    torch.testing.assert_close(found, local(x()))
    assert len(seen) == 2
    assert seen[0] is not None
    assert seen[1] == "backward"


def test_a_hook_of_all_modules_sees_the_last_one() -> None:
    _, spread = layers("12")
    seen: list[nn.Module] = []
    hook = torch_modules.register_module_forward_hook(
        lambda module, given, output: seen.append(module)
    )
    try:
        with autograd.context():
            spread(x())
    finally:
        hook.remove()
    assert spread[1] in seen
    assert spread[0] not in seen


@pytest.mark.parametrize("at", [0, 1])
def test_a_subclass_that_computes_here_is_called_here(at: int) -> None:
    parts = [RemoteModule(worker, nn.Identity) for worker in WORKERS]
    parts[at] = modules.Halving(WORKERS[at], nn.Identity)
    with autograd.context():
        torch.testing.assert_close(RemoteSequential(*parts)(x()), x() / 2)


def test_there_may_be_very_many_modules() -> None:
    add = RemoteModule("worker1", modules.linear, (1, 1, 1))
    add.run(make_one)
    given = torch.zeros(1, requires_grad=True)
    for count in (255, 256, 300):
        with autograd.context() as context_id:
            found = RemoteSequential(*[add] * count)(given)
            assert found.item() == count
            if count == 256:
                autograd.backward(context_id, [found.sum()])
                assert autograd.get_gradients(context_id)[given].item() == 1.0


def make_one(module: nn.Linear) -> None:
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)


def test_parts_of_it_and_copies_are_of_its_kind() -> None:
    local, spread = layers("1212")
    part, copied = spread[1:3], copy.deepcopy(spread)
    assert type(part) is RemoteSequential
    assert type(copied) is RemoteSequential
    with autograd.context():
        torch.testing.assert_close(part(x()), local[1:3](x()))
        torch.testing.assert_close(copied(x()), local(x()))


def test_activations_do_not_pass_through_the_caller() -> None:
    width = 1 << 18
    spread = RemoteSequential(*[RemoteModule(w, modules.Wide, (width,)) for w in WORKERS])
    start = torch.ones(1, requires_grad=True)
    before = modules.bytes_moved()
    with autograd.context() as context_id:
        autograd.backward(context_id, [spread(start)])
        gradient = autograd.get_gradients(context_id)[start]
    torch.testing.assert_close(gradient, torch.full((1,), 0.25))
    assert modules.bytes_moved() - before < 10_000


# From elsewhere, and from many.


def check_of_seeds(spread: RemoteSequential, seeds: tuple[int, ...]) -> None:
    """Outputs, and the gradient of the input, are those of these layers in one process."""
    local = nn.Sequential(*[modules.linear(4, 4, seed) for seed in seeds])
    here, there = x().requires_grad_(), x().requires_grad_()
    local(here).square().sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [spread(there).square().sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)


@pytest.mark.parametrize("inside", [("worker2", "main"), ("main", "main"), ("worker2", "worker1")])
def test_one_may_be_inside_of_a_remote_module(inside: tuple[str, str]) -> None:
    outer = RemoteModule("worker1", modules.HolderOfSeveral, inside)
    check_of_seeds(RemoteSequential(outer), (10, 11, 12))
    after = RemoteModule("worker2", modules.linear, (4, 4, 20))
    check_of_seeds(RemoteSequential(outer, after), (10, 11, 12, 20))
    check_of_seeds(RemoteSequential(after, outer, after), (20, 10, 11, 12, 20))


def call_of_parts(parts: list[RemoteModule], given: Tensor) -> Tensor:
    found: Tensor = RemoteSequential(*parts)(given)
    return found


def test_a_worker_may_call_one_in_the_context_of_its_caller() -> None:
    local, spread = layers("12")
    here, there = x().requires_grad_(), x().requires_grad_()
    local(here).square().sum().backward()
    for worker in WORKERS:
        with autograd.context() as context_id:
            found = rpc.rpc_sync(worker, call_of_parts, args=(list(spread), there))
            autograd.backward(context_id, [found.square().sum()])
            torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)


def test_many_threads_may_call_one_at_once() -> None:
    local, spread = layers("121")
    here = x().requires_grad_()
    local(here).square().sum().backward()

    def one(number: int) -> None:
        there = x().requires_grad_()
        with autograd.context() as context_id:
            autograd.backward(context_id, [spread(there).square().sum()])
            torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(48)))


# As a part of training.


@pytest.mark.parametrize("at_once", [False, True])
def test_it_is_trained_as_in_one_process(at_once: bool) -> None:
    local, spread = layers("1-2")
    target = torch.ones(3, 4)
    optimizer = DistributedOptimizer(torch.optim.SGD, spread, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        theirs.zero_grad()
        nn.functional.mse_loss(local(x()), target).backward()
        theirs.step()
        with autograd.context() as context_id:
            loss = nn.functional.mse_loss(spread(x()), target)
            if at_once:
                optimizer.backward_and_step(context_id, [loss])
            else:
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
    assert_same_state(spread, local)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


def test_its_state_is_that_of_an_nn_sequential(tmp_path: Path) -> None:
    local, spread = layers("1-2")
    assert_same_state(spread, local)
    checkpoint.save(tmp_path, {"model": spread})
    other, _ = layers("---")
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    spread.load_state_dict(other.state_dict())
    assert_same_state(spread, other)
    checkpoint.load(tmp_path, {"model": spread})
    assert_same_state(spread, local)


@pytest.mark.parametrize("places", ["12", "-1-22"])
def test_a_compiled_function_may_call_it(places: str) -> None:
    local, spread = layers(places)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(given: Tensor) -> Tensor:
        return spread(given).square().sum()

    here, there = x().requires_grad_(), x().requires_grad_()
    expected = local(here).square().sum()
    expected.backward()
    for _ in range(2):
        with autograd.context() as context_id:
            loss = loss_of(there)
            torch.testing.assert_close(loss, expected)
            autograd.backward(context_id, [loss])
            torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)
