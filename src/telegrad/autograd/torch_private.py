"""Everything that telegrad uses of torch without torch promising it.

Each private call sits behind one small function here, and nowhere else. What is relied upon:

* Among the ready nodes of one engine call on one thread, the node with the highest sequence
  number runs first, and a sequence number may be set from Python. `local.py` rests on this: a
  send whose gradient has not come yet is given the lowest number, so the engine reaches it only
  when nothing else can run.
* The hook of a node sees gradients as the next nodes get them: summed to their shape, cast to
  their dtype. `local.py` keeps them as they are.
* A hook dictionary of an accumulator can be seen through the handle of a hook added to it.
* Compiled autograd is switched for the whole process.
* The node of a compiled function leads to the class that made it, which knows whether it was
  compiled with donated buffers.
* `Function.apply` is a Python function around one in C that does the work. What the outer one
  adds, functorch, is of use to functions that know how to deal with it; ours do not.

The first two are tried once at import: a torch that behaves otherwise is refused with a sentence
that says what changed, instead of giving wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

_engine: Any = torch.autograd.Variable._execution_engine
_compiled_autograd = torch._C._dynamo.compiled_autograd

_new_edge: Any = tuple.__new__
"""Makes a `GradientEdge` without the Python function that named tuples have for it."""

FIRST = 1 << 62
"""A sequence number above every other: the node runs the moment that it is ready."""


def set_sequence_number(node: Node, number: int) -> None:
    """Give `node` its place in the engine's queue: the highest number runs first."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def sequence_number(node: Node) -> int:
    return node._sequence_nr()


def applied(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """`function.apply`, without the Python in front of it, and whatever the grad mode is."""
    apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    is_grad_enabled = torch.is_grad_enabled

    def record(*arguments: Any) -> torch.Tensor:
        if is_grad_enabled():
            return apply(*arguments)
        with torch.enable_grad():
            return apply(*arguments)

    return record


def tensor_hooks(leaf: torch.Tensor) -> bool:
    """Does `leaf` carry hooks made by `Tensor.register_hook`?"""
    return bool(leaf._backward_hooks)


def hooked_leaves(accumulators: Iterable[Any]) -> list[Any]:
    """The accumulators of leaves that carry hooks made by `Tensor.register_hook`."""
    return [node for node in accumulators if node.variable._backward_hooks]


def owners(tensor: torch.Tensor) -> int:
    """How many references to the tensor behind this Python object exist in C++."""
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]


class _NodeHooks:
    """Whether any hook was ever registered from Python on a graph node.

    Torch has no question "has this accumulator hooks?"; the only answer, adding a hook and
    looking at the dictionary that holds it, costs microseconds per leaf. All such registrations
    go through one static method of `torch.autograd.Function`, so we pass through it too and
    remember that it happened: programs that hook no node (nearly all) never pay for the question.
    """

    def __init__(self) -> None:
        self.ever = False

    def watch(self) -> None:
        mixin: Any = torch.autograd.function._HookMixin
        register = mixin._register_hook

        def _register_hook(backward_hooks: Any, hook: Callable[..., Any]) -> Any:
            if not isinstance(hook, OwnHook):
                self.ever = True
            return register(backward_hooks, hook)

        mixin._register_hook = staticmethod(_register_hook)


class OwnHook:
    """Marks a node hook as telegrad's own."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *gradients: Any) -> None:
        self.call(*gradients)


node_hooks = _NodeHooks()


def accumulator_hooks(accumulator: Node) -> bool:
    """Does the accumulator of a leaf carry hooks that were registered on it from Python?"""
    if not node_hooks.ever:
        return False
    nothing = OwnHook(lambda *_: None)
    for register in (accumulator.register_hook, accumulator.register_prehook):
        handle: Any = register(nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def hooked_accumulators(accumulators: Iterable[Any]) -> list[Any]:
    """Those on which hooks hang that torch calls when it accumulates, as far as Python sees."""
    return [
        node
        for node in accumulators
        if getattr(node.variable, "_post_accumulate_grad_hooks", None)
        or (node_hooks.ever and accumulator_hooks(node))
    ]


class eager_engine:
    """Run the engine itself, on this thread, for all devices.

    Compiled autograd traces a graph before it runs any of it; nodes that talk to other workers
    cannot be traced, so it is off in here. One thread means one queue: the order by sequence
    number then holds over all devices, and hooks run where the context is current.
    """

    __slots__ = ("_compiler", "_threads")

    def __enter__(self) -> None:
        self._threads = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        self._compiler = _compiled_autograd.set_autograd_compiler(None, False)

    def __exit__(self, *_: object) -> None:
        if self._compiler[0] is not None:
            _compiled_autograd.set_autograd_compiler(*self._compiler)
        torch._C._set_multithreading_enabled(self._threads)


def run_engine(
    roots: Sequence[tuple[tuple[Node, int], torch.Tensor]],
    leaves: Sequence[Node],
    inputs: Sequence[torch.Tensor] = (),
    *,
    retain_graph: bool,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` from edges with known gradients, on this thread, for leaves given by
    their accumulators and for other inputs.

    The public function checks shapes again and looks for functorch and tensor subclasses; that
    costs as much as a small graph. The engine itself refuses gradients that do not fit.

    Nor is a copy of the Python context put into the thread's C++ state, as the public function does
    for engine threads that there are none of here. See `accumulate` for the harm it can do.
    """
    with eager_engine():
        results: tuple[torch.Tensor | None, ...] = _engine.run_backward(
            tuple([_new_edge(GradientEdge, (*edge, None)) for edge, _ in roots]),
            tuple([gradient for _, gradient in roots]),
            retain_graph,
            create_graph,
            (*[_new_edge(GradientEdge, (leaf, 0, None)) for leaf in leaves], *inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    return results


def keep_compiled_nodes_usable(nodes: Iterable[Any]) -> None:
    """Before a pass that retains the graph: let compiled nodes run, that may run again.

    Code that was compiled with donated buffers overwrites what it saved, and torch refuses to
    retain it. Code that was compiled without them says None about them, which torch refuses, too.
    """
    for node in nodes:
        metadata: Any = getattr(getattr(node, "_forward_cls", None), "metadata", None)
        if getattr(metadata, "bw_donated_idxs", ()) is None:
            metadata.bw_donated_idxs = []


def accumulate(
    leaves: Iterable[Node], gradients: Iterable[torch.Tensor], *, create_graph: bool
) -> None:
    """`torch.autograd.backward` from the accumulators of leaves.

    The public function keeps a Python object in the C++ state of the thread meanwhile. A
    collective that DDP's reducer begins in here takes that state with it, and gloo's thread lets go
    of it last: for that it needs the interpreter lock, with which the thread that takes down the
    process group waits for it. So nothing of Python is put there.
    """
    with eager_engine():
        _engine.run_backward(
            tuple([_new_edge(GradientEdge, (leaf, 0, None)) for leaf in leaves]),
            tuple(gradients),
            create_graph,
            create_graph,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def drop_queued_tasks() -> None:
    """Let go of what a failed engine call left in this thread's queue (it holds the graph)."""
    with torch.enable_grad(), eager_engine():
        leaf = torch.zeros((), requires_grad=True)
        torch.autograd.grad(leaf * 1, leaf)


def self_test() -> None:
    """Refuse a torch whose engine does not order nodes as `local.py` needs."""
    order: list[str] = []
    with torch.enable_grad():
        leaf = torch.zeros(3, requires_grad=True)
        first, second = leaf * 2, leaf.sum()
    # By itself the node that was made later runs first, so the numbers must turn that round.
    for name, output in (("high", first), ("low", second)):
        assert output.grad_fn is not None
        set_sequence_number(output.grad_fn, 1 if name == "low" else FIRST)
        output.grad_fn.register_prehook(OwnHook(lambda _, name=name: order.append(name)))
    with eager_engine():
        edges = [GradientEdge(t.grad_fn, 0) for t in (first, second) if t.grad_fn is not None]
        torch.autograd.grad(edges, leaf, [torch.ones(3), torch.ones(())])
    if order != ["high", "low"]:
        raise ImportError(
            f"torch {torch.__version__} runs ready graph nodes in the order {order}, but telegrad "
            "needs the highest sequence number first: its gradients would be wrong. Use a torch "
            "version that telegrad supports (2.13)."
        )
    _test_hooks_see_fitted_gradients()


def _test_hooks_see_fitted_gradients() -> None:
    seen: list[torch.Size] = []
    with torch.enable_grad():
        leaf = torch.zeros(3, requires_grad=True)
        spread = leaf + torch.zeros(2, 3)
    assert spread.grad_fn is not None
    spread.grad_fn.register_hook(OwnHook(lambda inputs, _: seen.append(inputs[0].shape)))
    with eager_engine():
        torch.autograd.grad(spread, leaf, torch.ones(2, 3))
    if seen != [torch.Size([3])]:
        raise ImportError(
            f"torch {torch.__version__} shows to the hooks of a node a gradient of shape {seen} "
            "for an input of shape (3,): telegrad keeps what it sees there, and its gradients "
            "would be wrong. Use a torch version that telegrad supports (2.13)."
        )


self_test()
node_hooks.watch()
