"""Everything that telegrad uses of torch without torch promising it.

Each private call sits behind one small function here, and nowhere else. What is relied upon:

* Among the ready nodes of one engine call on one thread, the node with the highest sequence
  number runs first, and a sequence number may be set from Python. `local.py` rests on this: a
  send whose gradient has not come yet is given the lowest number, so the engine reaches it only
  when nothing else can run.
* The hook of a node sees gradients as the next nodes get them: summed to their shape, cast to
  their dtype. `local.py` keeps them as they are.
* The default process group is an attribute of one object for all of them.
* A hook dictionary of an accumulator can be seen through the handle of a hook added to it.
* Compiled autograd is switched for the whole process.
* The node of a compiled function leads to the class that made it, which knows whether it was
  compiled with donated buffers, has the graph of its backward as it was traced, and runs it by a
  static method. The state of module hooks is an attribute of the node.
* `Function.apply` is a Python function around one in C that does the work. What the outer one
  adds, functorch, is of use to functions that know how to deal with it; ours do not.

The first two are tried once at import: a torch that behaves otherwise is refused with a sentence
that says what changed, instead of giving wrong gradients.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.fx.experimental._backward_state import BackwardState

_engine: Any = torch.autograd.Variable._execution_engine
_compiler = torch._C._dynamo.compiled_autograd
_is_multithreading_enabled = torch._C._is_multithreading_enabled
_set_multithreading_enabled = torch._C._set_multithreading_enabled

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


_tensor_hooks_of = attrgetter("variable._backward_hooks")
_accumulate_hooks_of = attrgetter("variable._post_accumulate_grad_hooks")
variable_of: Callable[[Any], torch.Tensor] = attrgetter("variable")
"""The leaf whose accumulator this is."""


def hooked_leaves(accumulators: Iterable[Any]) -> list[Any]:
    """The accumulators of leaves that carry hooks made by `Tensor.register_hook`."""
    return list(filter(_tensor_hooks_of, accumulators))


_world: Any = (
    torch.distributed.distributed_c10d._world if torch.distributed.is_available() else None
)


def process_group_exists() -> bool:
    """As `torch.distributed.is_initialized()`, which takes three functions to say so."""
    return _world is not None and _world._default_pg is not None


owners: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""How many references to the tensor behind this Python object exist in C++."""


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether other tensors may have elements in the memory of this one."""
    if tensor.layout is not torch.strided:
        return True
    # Two that know the memory are the tensor and the object that is asked.
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


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
    if not node_hooks.ever:
        return list(filter(_accumulate_hooks_of, accumulators))
    return [n for n in accumulators if _accumulate_hooks_of(n) or accumulator_hooks(n)]


class _CompiledAutograd:
    """Compiled autograd, kept off while any thread of ours runs the engine.

    It is one switch for the whole process, so the first of our threads that finds it on puts it
    away, and the last brings it back, unless the user has switched it off meanwhile. Each for
    itself, one would bring it back while the engine of another runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._away: Any = None

    def put_away(self) -> bool:
        """Switch it off; tells whether it must be brought back."""
        found = _compiler.set_autograd_compiler(None, False)
        if found[0] is None and self._away is None:
            return False
        with self._lock:
            self._users += 1
            if found[0] is not None:
                self._away = found
        return True

    def bring_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            found, self._away = self._away, None
            if found is not None and torch._dynamo.compiled_autograd.compiled_autograd_enabled:
                _compiler.set_autograd_compiler(*found)


compiled_autograd = _CompiledAutograd()


class eager_engine:
    """Run the engine itself, on this thread, for all devices.

    Compiled autograd walks the whole graph before it runs any of it, and compiles what it saw. Our
    nodes are not known before they run: a send gives what arrives, a call may be suspended and go
    on from other roots. So it is off in here; what depends on it, the hooks of modules that were
    compiled, is done by `hooks_of_compiled_modules`. One thread means one queue: the order by
    sequence number then holds over all devices, and hooks run where the context is current.
    """

    __slots__ = ("_is_away", "_threads")

    def __enter__(self) -> None:
        self._threads = _is_multithreading_enabled()
        if self._threads:
            _set_multithreading_enabled(False)
        self._is_away = compiled_autograd.put_away()

    def __exit__(self, *_: object) -> None:
        if self._is_away:
            compiled_autograd.bring_back()
        if self._threads:
            _set_multithreading_enabled(True)


class _HooksOfCompiledModules:
    """Runs the backward hooks of modules inside of compiled functions.

    Dynamo accepts a module with such hooks only while compiled autograd is on, because the compiled
    backward has a gap where each hook is called, and torch leaves it to compiled autograd to fill
    them in; without it, torch refuses to run that backward at all. Its graph can be run as it was
    traced, though, operation by operation, and then a gap simply calls its hook. So that is done.

    A compiled function with hooks gets a new `BackwardState` in every run. We count them, so that
    programs without such functions (nearly all) never pay for a look at their nodes.
    """

    def __init__(self) -> None:
        self.ever = False
        self._prepared: weakref.WeakSet[type] = weakref.WeakSet()

    def watch(self) -> None:
        def note(_: BackwardState) -> None:
            self.ever = True

        BackwardState.__init__ = note  # type: ignore[method-assign, assignment]

    def prepare(self, nodes: Iterable[Any]) -> None:
        """Have those of the nodes that are compiled functions with hooks run operation by
        operation."""
        for node in nodes:
            if getattr(node, "_compiled_autograd_backward_state", None) is not None:
                function = node._forward_cls
                if function not in self._prepared:
                    function._backward_impl = staticmethod(_by_operation(function))
                    self._prepared.add(function)


def _by_operation(function: Any) -> Callable[[Any, Sequence[Any]], Any]:
    graph = _backward_graph(function)

    def backward(ctx: Any, arguments: Sequence[Any]) -> Any:
        ctx.maybe_clear_saved_tensors()
        # The casts of autocast are in the graph.
        with torch._C._DisableAutocast():
            return graph(*arguments, ctx._compiled_autograd_backward_state)

    return backward


def _backward_graph(function: Any) -> torch.fx.GraphModule:
    """A copy of the traced backward that takes tensors with any strides: compiled code may have
    chosen others than those that were traced."""
    traced = torch._dynamo.compiled_autograd.extract_bw_module(function)
    graph: torch.fx.GraphModule = copy.deepcopy(traced)  # type: ignore[assignment]
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph


hooks_of_compiled_modules = _HooksOfCompiledModules()


def run_engine(
    edges: Sequence[tuple[Node, int]],
    gradients: Sequence[torch.Tensor],
    leaves: Sequence[Node],
    inputs: Sequence[torch.Tensor],
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
    roots = tuple([_new_edge(GradientEdge, (node, index, None)) for node, index in edges])
    with eager_engine():
        results: tuple[torch.Tensor | None, ...] = _engine.run_backward(
            roots,
            tuple(gradients),
            retain_graph,
            create_graph,
            (*_edges_into(leaves), *inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    return results


def _edges_into(nodes: Iterable[Node]) -> Iterator[GradientEdge]:
    """The edge into the first input of each, made without a line of Python for it: there may be
    thousands."""
    return map(_new_edge, repeat(GradientEdge), zip(nodes, repeat(0), repeat(None), strict=False))


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
            tuple(_edges_into(leaves)),
            tuple(gradients),
            create_graph,
            create_graph,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def make_engine() -> None:
    """Have torch make its engine anew in a process that was forked, while one thread works here.

    The first operation there that saves a tensor destroys the engine of the parent and makes
    another, with no lock: two threads that serve requests at once ended the process.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).exp()


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
hooks_of_compiled_modules.watch()
