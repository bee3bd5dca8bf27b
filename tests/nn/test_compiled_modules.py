"""Modules that are compiled where they live, called by many at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from telegrad import autograd
from telegrad.nn import RemoteModule
from tests.nn import modules

pytestmark = pytest.mark.usefixtures("workers")


def test_many_first_calls_of_a_compiled_module_compile_it_once() -> None:
    module = RemoteModule(
        "worker1", modules.Layers, compile={"backend": modules.counting, "fullgraph": True}
    )
    module.run(modules.take_compilations)
    expected = modules.Layers()
    for rows, compilations in ((3, 1), (5, 1), (7, 0)):
        inputs = [torch.randn(rows, 4, requires_grad=True) for _ in range(12)]
        with autograd.context() as context_id:
            futures = [module.forward_async(each) for each in inputs]
            outputs = [future.wait() for future in futures]
            autograd.backward(context_id, [output.sum() for output in outputs])
            found = autograd.get_gradients(context_id)
        assert module.run(modules.take_compilations) == compilations
        for each, output in zip(inputs, outputs, strict=True):
            torch.testing.assert_close(output, expected(each))
            (gradient,) = torch.autograd.grad(expected(each).sum(), each)
            torch.testing.assert_close(found[each], gradient)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_graph_of_a_compiled_module_can_be_retained(backend: str) -> None:
    module = RemoteModule("worker1", modules.Layers, compile={"backend": backend})
    start = torch.randn(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(modules.Layers()(start).sum(), start)
    # The first round compiles the backward for passes that do not retain.
    for rounds in (1, 3):
        with autograd.context() as context_id:
            loss = module(start).sum()
            for done in range(1, rounds + 1):
                autograd.backward(context_id, [loss], retain_graph=done < rounds)
                found = autograd.get_gradients(context_id)[start]
                torch.testing.assert_close(found, done * expected)


def test_warm_calls_of_a_compiled_module_from_many_threads_are_right() -> None:
    module = RemoteModule("worker1", modules.Layers, compile={"backend": "aot_eager"})
    expected = modules.Layers()

    def train(seed: int) -> None:
        start = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with autograd.context() as context_id:
            output = module(start)
            autograd.backward(context_id, [output.pow(2).sum()])
            got = autograd.get_gradients(context_id)[start]
        torch.testing.assert_close(output, expected(start))
        torch.testing.assert_close(got, torch.autograd.grad(expected(start).pow(2).sum(), start)[0])

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(train, seed) for seed in range(100)]:
            done.result()
