"""Pipelines give the loss and the gradients of the whole batch in one process."""

from __future__ import annotations

import copy
import time
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from telegrad import autograd, rpc
from telegrad.nn import Pipeline, RemoteModule
from telegrad.nn.pipeline import join
from telegrad.optim import DistributedOptimizer
from tests.nn import modules

pytestmark = pytest.mark.usefixtures("workers")

PLACES = ("worker1", "worker2", "worker1")


def make_stages() -> list[RemoteModule]:
    return [RemoteModule(place, modules.stage, (n,)) for n, place in enumerate(PLACES)]


def make_local() -> nn.Sequential:
    return nn.Sequential(*(modules.stage(n) for n in range(len(PLACES))))


def batch(rows: int = 11, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def gradients_of(module: nn.Module, context_id: int) -> list[Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[p] for p in module.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 4, 20])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_loss_and_gradients_are_those_of_one_process(schedule: str, micro_batches: int) -> None:
    local, stages = make_local(), make_stages()
    pipeline = Pipeline(stages, micro_batches, schedule)
    x, y = batch()
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = nn.functional.mse_loss(local(here), y)
    expected.backward()
    with autograd.context() as context_id:
        loss = pipeline.forward_backward(context_id, there, y, nn.functional.mse_loss)
        found = [stage.run(gradients_of, context_id) for stage in stages]
        torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)
    torch.testing.assert_close(loss, expected.detach())
    for layer, gradients in zip(local, found, strict=True):
        torch.testing.assert_close(gradients, [p.grad for p in layer.parameters()])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_that_is_a_sum_adds_up(schedule: str) -> None:
    local, pipeline = make_local(), Pipeline(make_stages(), 3, schedule)
    x, y = batch()
    with autograd.context() as context_id:
        loss = pipeline.forward_backward(context_id, x, y, sum_of_squares, reduction="sum")
    torch.testing.assert_close(loss, sum_of_squares(local(x), y).detach())


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 8), ("1f1b", 3)])
def test_a_stage_keeps_as_many_activations_as_the_schedule_says(schedule: str, most: int) -> None:
    stages = make_stages()
    pipeline = Pipeline(stages, 8, schedule)
    x, y = batch(16)
    with autograd.context() as context_id:
        pipeline.forward_backward(context_id, x, y, nn.functional.mse_loss)
    kept = stages[0].run(modules.most_under_way)
    assert kept == most if schedule == "gpipe" else kept <= most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_pass_each_stage_in_order(schedule: str) -> None:
    stages = make_stages()
    pipeline = Pipeline(stages, 6, schedule)
    x, y = batch(12)
    for _ in range(2):
        with autograd.context() as context_id:
            pipeline.forward_backward(context_id, x, y, nn.functional.mse_loss)
    with torch.no_grad():
        local = make_local()
        for part in torch.tensor_split(x, 6):
            local(part)
    for stage, layer in zip(stages, local, strict=True):
        expected = modules.order_of(layer)  # type: ignore[arg-type]
        assert stage.run(modules.order_of) == pytest.approx(expected * 2, abs=2e-4)


def test_training_reaches_the_parameters_of_one_process() -> None:
    local, pipeline = make_local(), Pipeline(make_stages(), 4)
    plain = optim.Adam(local.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(optim.Adam, pipeline, lr=0.05)
    for seed in range(4):
        x, y = batch(seed=seed)
        plain.zero_grad()
        nn.functional.mse_loss(local(x), y).backward()
        plain.step()
        with autograd.context() as context_id:
            pipeline.forward_backward(context_id, x, y, nn.functional.mse_loss)
            optimizer.step(context_id)
    assert list(pipeline.state_dict()) == [f"stages.{name}" for name in local.state_dict()]
    torch.testing.assert_close(
        list(pipeline.state_dict().values()), list(local.state_dict().values())
    )


def test_as_a_module_it_gives_the_output_of_the_batch() -> None:
    local, pipeline = make_local(), Pipeline(make_stages(), 4)
    x, y = batch()
    torch.testing.assert_close(pipeline(x), local(x).detach())
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    nn.functional.mse_loss(local(here), y).backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [nn.functional.mse_loss(pipeline(there), y)])
        torch.testing.assert_close(autograd.get_gradients(context_id)[there], here.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_keywords_go_to_the_first_stage_cut_like_the_batch(schedule: str) -> None:
    local = [modules.Masked(), modules.stage(1)]
    stages = [
        RemoteModule("worker1", modules.Masked),
        RemoteModule("worker2", modules.stage, (1,)),
    ]
    pipeline = Pipeline(stages, 4, schedule)
    x, y = batch(11)
    mask = (torch.arange(11) % 3 != 0).float().unsqueeze(1)
    expected = local[1](local[0](x, mask=mask, factor=2.0))
    torch.testing.assert_close(pipeline(x, mask=mask, factor=2.0), expected.detach())
    nn.functional.mse_loss(expected, y).backward()
    with autograd.context() as context_id:
        loss = nn.functional.mse_loss
        pipeline.forward_backward(context_id, x, y, loss, mask=mask, factor=2.0)
        found = [stage.run(gradients_of, context_id) for stage in stages]
    for layer, gradients in zip(local, found, strict=True):
        torch.testing.assert_close(gradients, [p.grad for p in layer.parameters()])


@pytest.mark.parametrize("places", [("worker1", "worker2"), ("worker1", "worker1")])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_may_change_their_inputs_in_place(schedule: str, places: tuple[str, str]) -> None:
    local = nn.Sequential(modules.linear(6, 6, 0), modules.InPlace())
    stages = [
        RemoteModule(places[0], modules.linear, (6, 6, 0)),
        RemoteModule(places[1], modules.InPlace),
    ]
    pipeline = Pipeline(stages, 3, schedule)
    x, y = batch(8)
    nn.functional.mse_loss(local(x), y).backward()
    with autograd.context() as context_id:
        pipeline.forward_backward(context_id, x, y, nn.functional.mse_loss)
        found = [stage.run(gradients_of, context_id) for stage in stages]
    for layer, gradients in zip(local, found, strict=True):
        torch.testing.assert_close(gradients, [p.grad for p in layer.parameters()])


def test_containers_are_cut_and_put_together() -> None:
    attend = RemoteModule("worker1", modules.Pairs)
    pipeline = Pipeline([attend], 3)
    a, b = batch(7)
    found = pipeline({"pair": (a, b), "factor": 2.0})
    torch.testing.assert_close(found, {"sum": (a + b) * 2.0, "list": [a, b]})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_that_fails_is_told_and_the_next_batch_passes(schedule: str) -> None:
    fails = RemoteModule("worker1", modules.FailsAt)
    pipeline = Pipeline([fails, RemoteModule("worker2", modules.stage, (1,))], 6, schedule)
    x, y = batch(12)
    bad = x.clone()
    bad[3, 3] = 13
    with autograd.context() as context_id, pytest.raises(ArithmeticError, match="thirteen"):
        pipeline.forward_backward(context_id, bad, y, nn.functional.mse_loss)
    with autograd.context() as context_id:
        loss = pipeline.forward_backward(context_id, x, y, nn.functional.mse_loss)
    torch.testing.assert_close(loss, nn.functional.mse_loss(modules.stage(1)(x * 2), y).detach())


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    stage = RemoteModule("worker1", nn.Identity)
    with pytest.raises(TypeError, match="RemoteModule"):
        Pipeline([nn.Identity()], 2)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="micro_batches=0"):
        Pipeline([stage], 0)
    with pytest.raises(ValueError, match="zigzag"):
        Pipeline([stage], 2, "zigzag")
    with autograd.context() as context_id, pytest.raises(autograd.AutogradError, match="works in"):
        Pipeline([stage], 2).forward_backward(context_id + 1, *batch(), nn.functional.mse_loss)
    with autograd.context() as context_id, pytest.raises(ValueError, match="11 has targets for 3"):
        Pipeline([stage], 2).forward_backward(
            context_id, batch()[0], batch(3)[1], nn.functional.mse_loss
        )
    assert Pipeline([stage], 2)(torch.zeros(0, 6)).shape == (0, 6)
    with pytest.raises(TypeError, match="no tensor"):
        Pipeline([stage], 2)({"factor": 2.0})


def test_bytes_at_the_caller_are_those_of_inputs_and_targets() -> None:
    wide = 1 << 16
    stages = [
        RemoteModule("worker1", modules.Widen, (wide,)),
        RemoteModule("worker2", modules.Narrow, (wide,)),
    ]
    pipeline = Pipeline(stages, 4)
    x = torch.ones(8, 1)
    before = modules.bytes_moved()
    with autograd.context() as context_id:
        pipeline.forward_backward(context_id, x, x, nn.functional.mse_loss)
    moved: Any = modules.bytes_moved() - before
    print(f"bytes at the caller: {moved}; one activation has {8 * wide * 4}")
    assert moved < 30_000


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_mean_over_no_rows_is_nan(schedule: str) -> None:
    pipeline = Pipeline(make_stages(), 3, schedule)
    x, y = batch(0)
    with autograd.context() as context_id:
        loss = pipeline.forward_backward(context_id, x, y, nn.functional.mse_loss)
    assert torch.isnan(loss)


def test_a_keyword_without_a_dimension_goes_to_all_and_one_of_other_length_is_refused() -> None:
    pipeline = Pipeline([RemoteModule("worker1", modules.Scaled)], 3)
    x, _ = batch(6)
    torch.testing.assert_close(pipeline(x, factor=torch.tensor(2.0)), 2 * x)
    for odd in (torch.ones(1, 6), torch.ones(7)):
        with pytest.raises(ValueError, match=r"The keyword factor has a tensor of the shape"):
            pipeline(x, factor=odd)
    with pytest.raises(ValueError, match="The batch has a tensor"):
        pipeline((x, x[:2]))


def run_pipeline(pipeline: Pipeline, x: Tensor) -> Tensor:
    output: Tensor = pipeline(x)
    return output


def test_a_copy_has_stages_of_its_own_and_one_that_was_sent_shares_them() -> None:
    stages = [RemoteModule(place, modules.linear, (6, 6, 0)) for place in ("worker1", "worker2")]
    pipeline = Pipeline(stages, 3, "gpipe")
    x, _ = batch()
    copied = copy.deepcopy(pipeline)
    copied.load_state_dict({k: torch.zeros_like(v) for k, v in copied.state_dict().items()})
    assert not copied(x).any()
    assert pipeline(x).any()
    torch.testing.assert_close(rpc.rpc_sync("worker1", run_pipeline, (pipeline, x)), pipeline(x))


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target.abs().sum(1)).square().mean()


def first(kind: Any, value: Any) -> Any:
    return value[0] if kind in (tuple, list, Many) else value["x"] if kind else value


class Many(list[Any]):
    """A list of a class of its own."""


class Guarded(dict[str, Any]):
    """A dict that is changed item by item only."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("not in this way")


class FirstOf(nn.Module):
    """Takes and gives a container."""

    def forward(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = type(value)()
            made["x"] = value["x"] * 2
            return made
        return type(value)([value[0] * 2])


@pytest.mark.parametrize("kind", [tuple, list, dict, Many, Guarded, Counter, OrderedDict])
def test_containers_of_any_class_go_in_and_come_out(kind: Any) -> None:
    def made(x: Tensor) -> Any:
        if not issubclass(kind, dict):
            return kind([x])
        value = kind()
        value["x"] = x
        return value

    source = torch.arange(6.0).reshape(3, 2).requires_grad_()
    pipeline = Pipeline([RemoteModule("worker1", FirstOf)], 2)
    with autograd.context() as context_id:
        output = pipeline(made(source * 1))
        assert type(output) is kind
        torch.testing.assert_close(first(kind, output), source * 2)
        lazy = RemoteModule("worker2", nn.Identity).lazy(source)
        torch.testing.assert_close(
            first(kind, RemoteModule("worker1", FirstOf)(made(lazy))), source * 2
        )
        autograd.backward(context_id, [first(kind, output).sum()])
        torch.testing.assert_close(
            autograd.get_gradients(context_id)[source], torch.full((3, 2), 2.0)
        )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_complex_inputs_and_targets_may_have_a_graph_behind_them(schedule: str) -> None:
    gradients = []
    for here in (True, False):
        a = torch.randn(5, 3, dtype=torch.complex64, generator=torch.manual_seed(1))
        b = torch.randn(5, 3, generator=torch.manual_seed(2))
        a.requires_grad_()
        b.requires_grad_()
        x, target = a * (1 + 2j), b * 3
        if here:
            distance(x.abs(), target).backward()
            gradients.append([a.grad, b.grad])
            continue
        pipeline = Pipeline([RemoteModule("worker1", modules.Absolute)], 2, schedule)
        with autograd.context() as context_id:
            pipeline.forward_backward(context_id, x, target, distance)
            found = autograd.get_gradients(context_id)
            gradients.append([found[a], found[b]])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_comes_before_the_pipeline_is_run_backward_once(schedule: str) -> None:
    local, pipeline = make_local(), Pipeline(make_stages(), 4, schedule)
    x, y = batch()
    gradients = []
    for here in (True, False):
        prefix = modules.linear(6, 6, 7)
        if here:
            nn.functional.mse_loss(local(prefix(x).tanh()), y).backward()
            gradients.append([p.grad for p in prefix.parameters()])
            continue
        with autograd.context() as context_id:
            # Twice: what was cut off for the first batch counts once.
            for _ in range(2):
                pipeline.forward_backward(context_id, prefix(x).tanh(), y, nn.functional.mse_loss)
            found = autograd.get_gradients(context_id)
        assert len(found) == 2, "leaves that the pipeline made for itself are not shown"
        gradients.append([found[p] / 2 for p in prefix.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def fails_in_the_second(output: Tensor, target: Tensor) -> Tensor:
    if target[0, 0] == 1:
        raise ArithmeticError("told to fail")
    time.sleep(0.1)
    return output.square().sum()


def test_when_a_batch_has_failed_nothing_of_it_is_under_way_any_more() -> None:
    stages = make_stages()
    pipeline = Pipeline(stages, 6, "1f1b")
    x, y = torch.ones(6, 6), torch.zeros(6, 6)
    y[1] = 1
    with autograd.context() as context_id:
        with pytest.raises(ArithmeticError, match="told to fail"):
            pipeline.forward_backward(context_id, x, y, fails_in_the_second)
        found = stages[0].run(gradients_of, context_id)
        time.sleep(0.5)
        torch.testing.assert_close(stages[0].run(gradients_of, context_id), found, rtol=0, atol=0)


def same_device(output: Tensor, target: Tensor) -> Tensor:
    assert target.device == output.device
    return torch.zeros((), requires_grad=True) * 1


def test_targets_are_brought_to_the_device_of_the_output() -> None:
    pipeline = Pipeline([RemoteModule("worker1/meta", modules.linear, (6, 6, 0))], 2)
    x, y = batch()
    with autograd.context() as context_id:
        pipeline.forward_backward(context_id, x, y, same_device)


def two_losses(output: Tensor, target: Tensor) -> Any:
    return output.sum(), target.sum()


def test_what_is_no_loss_and_what_cannot_be_joined_is_told() -> None:
    x, y = batch()
    with (
        autograd.context() as context_id,
        pytest.raises(TypeError, match=r"is one tensor, but .* gave a tuple"),
    ):
        Pipeline(make_stages(), 2).forward_backward(context_id, x, y, two_losses)
    with pytest.raises(TypeError, match="tensor without a dimension for each micro-batch"):
        join([torch.ones(()), torch.ones(())])
    assert join([(torch.ones(1), None), (torch.ones(1), None)])[1] is None
    assert type(join([OrderedDict(a=torch.ones(1))])) is OrderedDict
