"""WorkerInfo, RRef, RemoteModule, futures and contexts in compiled functions: they fold, they are
compared and used as keys, and another one is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import telegrad.compile  # noqa: F401 - installs the guards
from telegrad import autograd, checkpoint, rpc
from telegrad.mesh import WorkerMesh, init_mesh
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer, GradScaler
from telegrad.rpc import WorkerInfo
from tests.compile import functions as f
from tests.compile.checks import compiled

pytestmark = pytest.mark.usefixtures("job")

Use = Callable[[Tensor, Any], Any]
FIRST, SECOND = WorkerInfo("worker1", 1), WorkerInfo("worker2", 2)


def check(use: Use, handles: list[Any], compilations: int) -> None:
    """Each handle, and the first again: as in eager mode, and never compiled without need."""
    fast, counter = compiled(use, "aot_eager")
    x = torch.ones(3, 3)
    for handle in (*handles, handles[0]):
        torch.testing.assert_close(fast(x, handle), use(x, handle))
    assert counter.frame_count == compilations


@dataclass
class Handles:
    """What the uses below compare with."""

    known: list[Any] = field(default_factory=list)


here = Handles()


@pytest.mark.parametrize(
    ("use", "compilations"),
    [
        (lambda x, w: x + (1 if w == rpc.get_worker_info("worker1") else 2), 2),
        (lambda x, w: x + w.id, 2),
        (lambda x, w: x + len(w.name), 2),
        (lambda x, w: x + {WorkerInfo("worker1", 1): 5, WorkerInfo("worker2", 2): 6}[w], 2),
        (lambda x, w: x + {FIRST: 5, SECOND: 6}[w], 3),
        (lambda x, w: rpc.rpc_sync(w, f.layer, (x, x)), 2),
        (lambda x, w: x if w is None else x + 1, 1),
        (lambda x, w: x + (FIRST, SECOND).index(w), 3),
        (lambda x, w: x + (1 if w in [FIRST] else 2), 2),
    ],
    ids=[
        "equality",
        "id",
        "name",
        "as key",
        "as key by another name",
        "as target",
        "or None",
        "in a tuple",
        "in a list",
    ],
)
def test_a_worker_info_folds_and_is_guarded(use: Use, compilations: int) -> None:
    check(use, [FIRST, SECOND, WorkerInfo("worker1", 1)], compilations)


def test_the_rank_of_a_worker_is_a_target() -> None:
    check(lambda x, rank: rpc.rpc_sync(rank, f.layer, (x * rank, x)), [1, 2], 2)


def test_the_same_object_is_guarded_where_it_is_asked_for() -> None:
    check(lambda x, w: x + (1 if w is FIRST else 2), [FIRST, WorkerInfo("worker1", 1)], 2)
    check(lambda x, w: x + (1 if w is not FIRST else 2), [FIRST, SECOND], 2)


@pytest.mark.parametrize(
    ("use", "compilations"),
    [
        (lambda x, r: x + r.owner().id + (10 if r.is_owner() else 0), 2),
        (lambda x, r: x + len(r.owner_name()), 2),
        (lambda x, r: x + (1 if r == here.known[0] else 2), 3),
        (lambda x, r: x + (1 if r is here.known[0] else 2), 3),
        (lambda x, r: x + here.known.index(r), 3),
        (lambda x, r: x + {k: i for i, k in enumerate(here.known)}[r], 3),
        (lambda x, r: x + r.to_here(), 3),
        (lambda x, r: x + r.rpc_async().mul(x).wait(), 3),
    ],
    ids=["owner", "owner name", "equality", "is", "in a list", "as key", "to_here", "method"],
)
def test_a_reference_folds_and_is_guarded(use: Use, compilations: int) -> None:
    here.known = [rpc.rpc_sync(w, f.referred, (n,)) for w, n in ((1, 1), (2, 2), (1, 3))]
    check(use, here.known, compilations)


def test_references_that_a_compiled_function_made_share_a_graph() -> None:
    make, _ = compiled(lambda x: rpc.remote("worker1", f.layer, (x, x)), "aot_eager")
    made = [make(torch.ones(3, 3) * n) for n in (1, 2)]
    check(lambda x, r: x + r.to_here() + len(r.owner_name()), made, 1)
    check(lambda x, r: x + (1 if r.is_owner() else 2), made, 1)
    check(lambda x, pair: x + (1 if pair[0] == pair[1] else 2), [made, made[:1] * 2], 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, m: m(x),
        lambda x, m: x + m.owner.id,
        lambda x, m: x + len(m.remote_device),
        lambda x, m: x + (1 if m == here.known[0] else 2),
        lambda x, m: x + (1 if m is here.known[0] else 2),
        lambda x, m: x + {k: i for i, k in enumerate(here.known)}[m],
    ],
    ids=["call", "owner", "remote device", "equality", "is", "as key"],
)
def test_a_remote_module_folds_and_is_guarded(use: Use) -> None:
    here.known = [
        RemoteModule("worker1", nn.Linear, (3, 3)),
        RemoteModule("worker2/cpu", nn.Linear, (3, 3)),
    ]
    with autograd.context():
        check(use, here.known, 2)


def test_a_future_can_be_waited_for_twice_kept_and_compared() -> None:
    def use(x: Tensor, word: str) -> Tensor:
        futures = {n: rpc.rpc_async("worker1", f.say, (x * n, word)) for n in (1, 2)}
        by_future = {future: n for n, future in futures.items()}
        total = x * 0
        for future, n in by_future.items():
            total = total + future.wait() * n + future.wait()
        return total + (1 if futures[1] == futures[2] else 2)

    check(use, ["once"], 1)
    assert rpc.rpc_sync("worker1", f.take_log) == ["once"] * 8


def test_a_future_passes_from_one_compiled_function_to_another() -> None:
    begin, _ = compiled(lambda x: rpc.rpc_async("worker1", f.say, (x, "hello")), "aot_eager")
    end, counter = compiled(lambda future: future.wait() + future.wait(), "aot_eager")
    for n in (1, 2, 3):
        torch.testing.assert_close(end(begin(torch.ones(2) * n)), torch.ones(2) * 2 * n)
    assert counter.frame_count == 1
    future = begin(torch.ones(2))
    assert future.wait() is future.wait()


def test_the_id_of_a_context_is_not_a_part_of_the_graph() -> None:
    def step(x: Tensor, context_id: int) -> Tensor:
        loss = rpc.rpc_sync("worker1", f.layer, (x, x)).sum()
        autograd.backward(context_id, [loss])
        return loss.detach()

    fast, counter = compiled(step, "aot_eager")
    x = torch.ones(3, 3, requires_grad=True)
    gradients = []
    for _ in range(5):
        with autograd.context() as context_id:
            fast(x, context_id)
            gradients.append(autograd.get_gradients(context_id)[x])
    # Torch takes any integer argument for a constant once, and then for one that changes.
    assert counter.frame_count == 2
    torch.testing.assert_close(gradients[0], gradients[2])


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda x, r: rpc.RRef(x).to_here(), "make it outside, or use rpc.remote"),
        (lambda x, r: x + r.confirmed_by_owner(), "ask outside of the compiled function"),
        (lambda x, r: rpc.rpc_async(1, f.halves, (x,)).done(), "wait for the future"),
        (lambda x, r: rpc.rpc_async(1, f.halves, (x,)).then(f.halves), "takes no callbacks"),
        (lambda x, r: x + here.known[0].wait(), "wait before, and pass the result"),
        (lambda x, r: here.known[1].lazy(x), "move this out of the compiled function"),
        (lambda x, r: here.known[1].state_dict(), "move this out of the compiled function"),
        (lambda x, r: autograd.get_gradients(1), "call get_gradients there after it"),
        (lambda x, r: autograd.retrieve_context(1), "call retrieve_context there after it"),
        (lambda x, r: autograd.backward(1, x.sum()), "takes a context id and a list of tensors"),
        (lambda x, r: r.backward(1), "call it outside of the compiled function"),
        (lambda x, r: here.known[2].clip_grad_norm_(1, 1.0), "between the compiled part and step"),
        (lambda x, r: here.known[2].clip_grad_value_(1, 1.0), "between the compiled part and step"),
        (lambda x, r: here.known[2].zero_grad(), "between the compiled part and step"),
    ],
    ids=[
        *("RRef", "confirmed", "done", "then", "future", "lazy", "state", "gradients"),
        *("retrieve", "roots", "backward", "clip norm", "clip value", "zero grad"),
    ],
)
def test_what_cannot_be_in_a_graph_says_what_to_move_out(use: Use, sentence: str) -> None:
    module = RemoteModule("worker1", nn.Linear, (3, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD, [module], lr=0.1)
    here.known = [rpc.rpc_async(1, f.referred, (1,)), module, optimizer]
    fast, _ = compiled(use, "eager")
    with pytest.raises(Exception, match=sentence):
        fast(torch.ones(3, 3), rpc.rpc_sync("worker1", f.referred, (1,)))


class Things:
    """What a graph could be asked to use."""

    def __init__(self) -> None:
        self.module = RemoteModule("worker1", nn.Linear, (3, 3))
        self.optimizer = DistributedOptimizer(torch.optim.SGD, [self.module], lr=0.1)
        self.scaler = GradScaler()
        self.pipeline = Pipeline([self.module], 2)
        self.future = rpc.rpc_async(1, f.referred, (1,))
        self.lazy = self.module.lazy(torch.ones(3, 3))
        self.mesh = WorkerMesh(("worker1",), (1,), ("data",))
        self.own = rpc.RRef(torch.ones(3))


@pytest.fixture(scope="module")
def things(_job: None) -> Things:
    return Things()


OUTSIDE: dict[str, Callable[[Tensor, Any], Any]] = {
    "init_rpc": lambda x, t: rpc.init_rpc("again"),
    "shutdown": lambda x, t: rpc.shutdown(),
    "wait_for_worker": lambda x, t: rpc.wait_for_worker("worker1"),
    "on_worker_lost": lambda x, t: rpc.on_worker_lost(print),
    "debug_info": lambda x, t: rpc.debug_info(),
    "local_value": lambda x, t: t.own.local_value(),
    "Future.done": lambda x, t: t.future.done(),
    "Future.value": lambda x, t: t.future.value(),
    "Future.then": lambda x, t: t.future.then(f.halves),
    "Future.add_done_callback": lambda x, t: t.future.add_done_callback(f.halves),
    "wait_all": lambda x, t: torch.futures.wait_all([t.future]),
    "describe": lambda x, t: autograd.describe(1),
    "require_context": lambda x, t: autograd.require_context(),
    "RemoteModule": lambda x, t: RemoteModule("worker1", nn.Linear, (3, 3)),
    "parameters": lambda x, t: list(t.module.parameters()),
    "named_buffers": lambda x, t: list(t.module.named_buffers()),
    "load_state_dict": lambda x, t: t.module.load_state_dict({}),
    "train": lambda x, t: t.module.train(),
    "eval": lambda x, t: t.module.eval(),
    "to": lambda x, t: t.module.to(torch.float64),
    "double": lambda x, t: t.module.double(),
    "apply": lambda x, t: t.module.apply(print),
    "requires_grad_": lambda x, t: t.module.requires_grad_(False),
    "module zero_grad": lambda x, t: t.module.zero_grad(),
    "deepcopy": lambda x, t: copy.deepcopy(t.module),
    "Lazy.then": lambda x, t: t.lazy.then(f.halves),
    "Lazy.backward": lambda x, t: t.lazy.backward(1),
    "Pipeline": lambda x, t: Pipeline([t.module], 2),
    "Pipeline.forward": lambda x, t: t.pipeline(x),
    "forward_backward": lambda x, t: t.pipeline.forward_backward(1, x, x, f.layer),
    "optimizer": lambda x, t: DistributedOptimizer(torch.optim.SGD, [t.module], lr=0.1),
    "add_param_group": lambda x, t: t.optimizer.add_param_group({"params": [x]}),
    "optimizer state": lambda x, t: t.optimizer.state_dict(),
    "load optimizer": lambda x, t: t.optimizer.load_state_dict({}),
    "all_finite": lambda x, t: t.optimizer.all_finite(1),
    "unscale_": lambda x, t: t.scaler.unscale_(t.optimizer, 1),
    "scaler step": lambda x, t: t.scaler.step(t.optimizer, 1),
    "scaler update": lambda x, t: t.scaler.update(),
    "save": lambda x, t: checkpoint.save("nowhere", {}),
    "load": lambda x, t: checkpoint.load("nowhere", {}),
    "exists": lambda x, t: checkpoint.exists("nowhere"),
    "init_mesh": lambda x, t: init_mesh((1,), ("data",)),
    "mesh run": lambda x, t: t.mesh.run(f.halves),
    "mesh close": lambda x, t: t.mesh.close(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_all_that_has_no_place_in_a_graph_says_so_in_a_sentence(name: str, things: Things) -> None:
    fast, _ = compiled(OUTSIDE[name], "eager")
    with pytest.raises(
        Exception,
        match=r"(outside|out) of the compiled function|pass the result|between the compiled part",
    ):
        fast(torch.ones(3, 3), things)


INSIDE: dict[str, Callable[[Tensor, Any], Any]] = {
    "get_worker_info": lambda x, t: x + rpc.get_worker_info().id,
    "get_worker_infos": lambda x, t: x + len(rpc.get_worker_infos()),
    "is_initialized": lambda x, t: x + rpc.is_initialized(),
    "forward_async": lambda x, t: t.module.forward_async(x).wait(),
    "Lazy.to_here": lambda x, t: t.lazy.to_here(),
    "scale": lambda x, t: t.scaler.scale(x) + t.scaler.get_scale(),
    "run": lambda x, t: t.module.run(f.weight_of) * x,
    "wait_all": lambda x, t: torch.futures.wait_all(
        [rpc.rpc_async(w, f.say, (x * w, "hello")) for w in (1, 2)]
    )[1],
    "collect_all": lambda x, t: (
        torch.futures.collect_all([rpc.rpc_async(1, f.say, (x, "hello"))]).wait()[0].wait()
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_rest_is_traced(name: str, things: Things) -> None:
    with autograd.context():
        check(INSIDE[name], [things], 1)
