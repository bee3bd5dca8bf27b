"""The compiled parts of a pass find what the Python beside them finds."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd import local, messages, nodes, plan, torch_private
from telegrad.autograd.context import SendRecord
from telegrad.autograd.errors import AutogradError
from telegrad.wire.parcel import Parcel
from tests.documents import ROOT

compiled = nodes.compiled
pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled")

SEEDS = range(60)


def recv(shape: Sequence[int], message: int = 7, index: int = 0) -> Tensor:
    """A tensor that came from worker 1."""
    tensors = [torch.zeros(shape) for _ in range(index + 1)]
    compiled.receive(message, 1, range(index + 1), tensors)
    return tensors[index]


def random_sources(draw: random.Random) -> tuple[list[plan.Source], list[Tensor]]:
    """Sends and roots over one graph of a few nodes, which they share or do not."""
    made: list[Tensor] = [torch.ones(2, requires_grad=True) for _ in range(draw.randint(1, 3))]
    made += [recv((2,), 10 + number) for number in range(draw.randint(0, 2))]
    ends = [*made]
    for _ in range(draw.randint(1, 12)):
        one, other = draw.choice(made), draw.choice(made)
        made.append(draw.choice([one * other, one + other, one * 2, one.sum() + other]))
    sources = []
    for number in range(draw.randint(1, 3)):
        several = draw.choices(made, k=draw.randint(1, 2))
        message, node, _ = nodes.send(lambda number=number: 100 + number, 1, several)
        sources.append(plan.Source(message, node, SendRecord(message, 1, node)))
    root = draw.choice(made) * 3
    sources.append(plan.Source(plan.ROOTS, [(root.grad_fn, root.output_nr)]))
    return sources, ends


def shown(groups: list[plan.Group]) -> list[tuple[Any, ...]]:
    return sorted(
        (
            sorted(source.message for source in group.sources),
            sorted(map(id, group.leaves)),
            sorted(map(id, group.recvs)),
        )
        for group in groups
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk_finds_the_groups_that_python_finds(seed: int) -> None:
    sources, _ = random_sources(random.Random(seed))
    for source in sources[: seed % 2]:
        for node, _ in source.edges:
            if type(node) is plan.LeafNode:
                node.variable.register_hook(lambda gradient: None)
    groups, nodes_of_python = plan.form_groups(sources)
    places = [(source.group, source.bit) for source in sources]
    found, count = plan.groups_of(sources)
    assert shown(found) == shown(groups)
    assert count == len(nodes_of_python)
    assert [(source.group, source.bit) for source in sources] == places


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("create", [False, True])
def test_a_run_gives_what_the_engine_gives_to_python(seed: int, create: bool) -> None:
    sources, _ = random_sources(random.Random(seed))
    for group in plan.form_groups(sources)[0]:
        weighted = [
            (source.start, [torch.rand(2) for _ in source.edges]) for source in group.sources
        ]
        for _, gradients in weighted:
            if len(gradients) > 1 and seed % 3 == 0:
                gradients[0] = None
        what = (weighted, group.leaves, group.recvs, True, create)
        ours, theirs = compiled.run(*what), local.run_in_python(*what)
        for some, others in zip(ours[:2], theirs[:2], strict=True):
            for one, other in zip(some, others, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert torch.equal(one, other)
                    assert one.requires_grad == other.requires_grad
        assert [(id(n), id(g)) for n, g in ours[2]] == [(id(n), id(g)) for n, g in theirs[2]]


def test_a_leaf_with_hooks_is_left_to_python_and_nothing_is_run() -> None:
    leaf = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    ran = []
    product = leaf * other
    product.register_hook(lambda gradient: ran.append(gradient))
    leaf.register_hook(lambda gradient: None)
    start = [(product.grad_fn, 0)]
    ends = [get_gradient_edge(each).node for each in (other, leaf)]
    assert compiled.run([(start, [torch.ones(2)])], ends, [], False, False) is None
    assert ran == []


@pytest.mark.parametrize("error", [RuntimeError, KeyError, local.Suspend, KeyboardInterrupt])
def test_an_error_inside_of_the_engine_comes_out_as_it_is(error: type[BaseException]) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise error("inside")

    leaf = torch.ones(2, requires_grad=True)
    made: Tensor = Failing.apply(leaf)
    ends = [get_gradient_edge(leaf).node]
    with pytest.raises(error, match="inside"):
        compiled.run([([(made.grad_fn, 0)], [torch.ones(2)])], ends, [], False, False)
    torch_private.drop_queued_tasks()


def test_the_engine_runs_on_the_calling_thread_and_switches_come_back() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    made = leaf * 2
    made.register_hook(lambda gradient: seen.append(threading.get_ident()))
    what = ([([(made.grad_fn, 0)], [torch.ones(2)])], [get_gradient_edge(leaf).node], [])
    compiled.run(*what, True, False)
    assert torch._C._is_multithreading_enabled()
    was_compiled = []
    with torch._dynamo.compiled_autograd._enable(was_compiled.append):
        compiled.run(*what, True, False)
        assert torch._dynamo.compiled_autograd.compiled_autograd_enabled
        switch = torch._C._dynamo.compiled_autograd.set_autograd_compiler
        compiler, _ = found = switch(None, False)
        switch(*found)
        assert compiler is not None, "it is brought back"
    assert was_compiled == []
    assert seen == [threading.get_ident()] * 2


@pytest.mark.parametrize(
    "case", ["plain", "shared", "held", "sparse", "gaps", "hook", "accumulate", "node", "removed"]
)
def test_gradients_of_leaves_are_settled_as_python_settles_them(case: str) -> None:
    weights = [torch.ones(3, 2, requires_grad=True) for _ in range(2)]
    accumulators = [get_gradient_edge(weight).node for weight in weights]
    one, other = torch.rand(3, 2), torch.rand(3, 2)
    if case == "shared":
        other = one
    if case == "sparse":
        one = one.to_sparse()
    if case == "gaps":
        one = torch.rand(3, 4)[:, ::2]
    # A node that has saved it holds it as well.
    keeper = one * torch.ones(3, 2, requires_grad=True) if case == "held" else None
    handles: list[Any] = []
    if case in ("hook", "removed"):
        handles.append(weights[0].register_hook(lambda gradient: None))
    if case == "accumulate":
        handles.append(weights[0].register_post_accumulate_grad_hook(lambda weight: None))
    if case == "node":
        handles.append(accumulators[0].register_hook(torch_private.OwnHook(lambda *_: None)))
    if case == "removed":
        handles[0].remove()
    found = compiled.settle({accumulators[0]: one, accumulators[1]: other})
    del keeper
    if case == "plain":
        given = [id(each) for pair in found for each in pair]
        assert given == [id(each) for each in (weights[0], one, weights[1], other)]
    else:
        assert found is None


def test_compiled_autograd_is_told_what_to_do_instead() -> None:
    loss = recv((2,)).sum()
    with (
        torch._dynamo.compiled_autograd._enable(lambda graph: graph),
        pytest.raises(AutogradError, match="A local backward reached a tensor that came"),
    ):
        loss.backward()


GRADIENTS = [
    torch.rand(2),
    torch.rand(4, 4)[::2, ::2],
    torch.rand(()).expand(3, 3),
    torch.rand(200, 200).t(),
    torch.eye(3).to_sparse(),
    torch.rand(2, requires_grad=True) * 1,
]


@pytest.mark.parametrize("place", range(len(GRADIENTS)))
@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("sequel", [None, messages.Sequel(9, b"data")])
def test_a_gradient_is_written_and_read_as_python_does(
    place: int, bits: int, sequel: messages.Sequel | None
) -> None:
    known = messages._OPTIONS[bits]
    options = messages.Options(known.retain_graph, known.create_graph, known.mode, sequel)
    history = messages.History(5) if bits == 3 else messages.NO_HISTORY
    message = messages.Gradient(options, history, bits % 2 == 0, 77, [GRADIENTS[place]], bits > 3)
    ours, theirs = compiled.write(3, 4, message), messages._encode(3, 4, message)
    assert type(ours) is Parcel
    assert ours[:2] == theirs[:2]
    (one,), (other,) = ours.tensors, theirs.tensors
    assert (one is GRADIENTS[place]) == (other is GRADIENTS[place])
    assert one.is_sparse or torch.equal(one, other)
    assert one.layout == other.layout
    assert one.is_sparse or one.stride() == other.stride()
    read, long_way = compiled.read(ours), messages._decode(theirs)
    if history.over_below:
        assert read is None
    else:
        assert read[:2] == long_way[:2]
        assert read[2][:4] == long_way[2][:4]
        assert read[2][5] == long_way[2][5]
        assert read[2].gradients[0] is one


@pytest.mark.parametrize(
    "message",
    [
        messages.Gradient(messages.Options(), messages.NO_HISTORY, True, 1, [None]),
        messages.Gradient(messages.Options(), messages.NO_HISTORY, True, 1, [torch.ones(1)] * 2),
        messages.Gradient(messages.Options(), messages.History(9, (1,)), True, 1, [torch.ones(1)]),
    ],
)
def test_what_is_not_one_gradient_is_left_to_python(message: messages.Gradient) -> None:
    assert compiled.write(1, 2, message) is None
    context, pass_id, read = messages.decode(messages.encode(1, 2, message))
    assert (context, pass_id, type(read)) == (1, 2, messages.Gradient)


def test_damaged_gradients_are_left_to_python() -> None:
    options = messages.Options(sequel=messages.Sequel(9, b"data"))
    message = messages.Gradient(options, messages.NO_HISTORY, True, 77, [torch.ones(1)])
    whole = messages._encode(1, 2, message)
    for size in range(len(whole.data)):
        assert compiled.read(Parcel(whole.topic, whole.data[:size], whole.tensors)) is None
    assert compiled.read(Parcel(whole.topic, whole.data + b"x", whole.tensors)) is None
    assert compiled.read(Parcel(whole.topic, whole.data, [])) is None
    assert compiled.read(Parcel(whole.topic, whole.data, None)) is None
    assert compiled.read(Parcel(whole.topic, whole.data, 3)) is None
    for strange in (None, 5, b"", ("topic", whole.data, whole.tensors)):
        assert compiled.read(strange) is None


def test_strange_arguments_are_errors_and_no_crash() -> None:
    one = torch.ones(2, requires_grad=True) * 1
    for call in (
        lambda: compiled.walk([[(None, 0)], 5]),
        lambda: compiled.walk([[(5, 0)]]),
        lambda: compiled.walk([[(one.grad_fn,)]]),
        lambda: compiled.run([([(one.grad_fn, 0)], [])], [], [], False, False),
        lambda: compiled.run([5], [], [], False, False),
        lambda: compiled.run([([(one.grad_fn, 0)], [5])], [one.grad_fn], [], False, False),
        lambda: compiled.send(lambda: "x", 1, [one]),
        lambda: compiled.send(lambda: 1, -1, [one]),
        lambda: compiled.send(lambda: 1, 1, [5]),
        lambda: compiled.receive(1, 1, [0, 0], [torch.ones(1)]),
        lambda: compiled.receive(1, 1, [3], [torch.ones(1)]),
        lambda: compiled.receive(1, 1, [0], [torch.ones(1, dtype=torch.int64)]),
        lambda: compiled.fits(one.grad_fn, [one]),
        lambda: compiled.settle({one.grad_fn: one.detach()}),
        lambda: compiled.settle([]),
        lambda: compiled.write(1, 2, 3),
        lambda: compiled.walk(),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError, IndexError, OverflowError)):
            call()


def test_a_graph_goes_with_the_node_of_its_send_and_not_with_the_garbage_collector() -> None:
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            ctx.watched = Watched.watched = torch.nn.Module()
            return tensor.clone()

    gc.disable()
    try:
        _, node, _ = nodes.send(lambda: 3, 1, [Watched.apply(recv((2,)))])
        alive = weakref.ref(Watched.watched)
        del Watched.watched
        assert alive() is not None, "the send keeps its graph"
        del node
        assert alive() is None
    finally:
        gc.enable()


def test_everything_passes_without_the_compiled_parts() -> None:
    """What users without a compiler have: the same tests, with the Python beside each part."""
    tests = ["crossing", "local", "leaves", "backward", "programs", "service"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
        + [f"tests/autograd/test_{name}.py" for name in tests],
        cwd=ROOT,
        env={**os.environ, "TELEGRAD_COMPILED": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
