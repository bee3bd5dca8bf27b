"""Runs one worker's graph in torch's own engine: wait or suspend.

The promise: every node runs exactly once, with its whole gradient, although the gradients of
different sends arrive at different times, from workers that may themselves wait for this one.

How. A group whose sources are all resolved is one plain engine call. Otherwise the call is made
with what is there *and with the Send nodes of pending sources as further roots*. So everything
below a pending send belongs to the call but cannot become ready, and the pending Send nodes, which
have the lowest sequence numbers, are reached only when nothing else can run. There the engine
thread waits for the next message:

* the gradient of that very send: it is returned, and the same call goes on;
* anything else (another source, absence, failure): the call is *suspended* by an exception.
  What flowed over cuts into nodes that have not run was kept by hooks on the nodes above; those
  edges are roots of the next call.

Why there is no deadlock. Take the latest-made send that is not resolved. All that its gradient
depends on was made later, so it is resolved and has run before any engine waits.

What must never happen:
* a None among root gradients (torch takes it for ones);
* a partly absent message flowing out of a Send node (nodes below would see undefined gradients):
  it is always entered as plain edges by a new call;
* a leaf evaluated in a call that is then suspended (its capture would be lost): the Gate;
* a leaf hook called twice or with None: hooked leaves get a call of their own at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd import torch_private
from telegrad.autograd.context import RecvRecord
from telegrad.autograd.enclosed import Enclosure, leaves_of
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.freeing import LARGE, free_without_recursion
from telegrad.autograd.leaves import Gradients, accumulating_for_real, add
from telegrad.autograd.messages import Options
from telegrad.autograd.nodes import anchor, compiled, engine_thread
from telegrad.autograd.plan import (
    ROOTS,
    Edge,
    Group,
    LeafNode,
    Source,
    Stages,
    State,
    edges_of,
    form_groups,
    groups_of,
    make_stages,
    run_first,
)

# In anomaly mode torch reports every exception of a node; a suspension is not an error.
warnings.filterwarnings("ignore", "Error detected in (Send|Gate)Backward")

_BRIEF = 60
"""Nodes, leaves among them. They take about as long to run as a message takes to leave."""

_ONE = torch.ones(())

prepares = torch_private.hooks_of_compiled_modules


class Suspend(Exception):
    """Leaves an engine call that cannot go on before something arrives."""


class Outlet(Protocol):
    """Where a run sends what it finds, and how it waits."""

    def gradient(self, message: int, gradients: Sequence[Tensor | None]) -> None: ...

    def absent(self, message: int) -> None: ...

    def wait(self, source: Source) -> None:
        """Nothing else can run here: return when `source` may be resolved, or else changed."""

    def wait_enclosed(self, source: Source) -> None:
        """As `wait`, from inside of a node: return when `source` is resolved."""


class Run:
    """One pass over one worker's graph. Driven by one thread at a time."""

    # What few runs need is set when they do.
    _current: Group | None = None
    _captured: list[tuple[list[tuple[int, Any, int]], list[Tensor | None]]]
    _left_tasks = False
    _closed = False

    def __init__(
        self,
        sources: dict[int, Source],
        recvs: Mapping[int, RecvRecord],
        outlet: Outlet,
        options: Options,
        enclosures: Sequence[Enclosure],
    ) -> None:
        """Both sources and recvs by their messages. Roots among the sources have their gradients;
        what came for the others is told by `resolve`."""
        self.sources = sources
        self.gradients = Gradients()
        self._outlet = outlet
        self._recvs = recvs
        self._create = options.create_graph
        self._retain = options.retain_graph or self._create
        self._enclosing = leaves_of(enclosures) if enclosures else {}
        self._reached: Collection[Any]
        """The nodes that the sources lead to; recvs in any case."""
        if compiled is None or self._enclosing or self._retain or prepares.ever:
            self._groups, self._reached = form_groups(sources.values(), self._enclosing)
            count = len(self._reached)
            if self._retain:
                torch_private.keep_compiled_nodes_usable(self._reached)
            if prepares.ever:
                prepares.prepare(self._reached)
            if count > LARGE:
                free_without_recursion(self._reached)
        else:
            self._groups, count = groups_of(sources.values())
            self._reached = {recv for group in self._groups for recv in group.recvs}
        self.brief = count <= _BRIEF and not self._enclosing
        """The engine is done so soon that nothing is gained by sending from inside it."""
        if not self.brief:
            for group in self._groups:
                run_first(group.recvs)
        self._open = len(self._groups)
        roots = sources.get(ROOTS)
        self._stirred = [] if roots is None else [self._groups[roots.group]]
        """Groups of which a source was resolved since they were last looked at."""
        self._fired: dict[int, dict[int, Tensor | None]] = {}
        self._answered: set[int] = set()
        self._answer_unreached()

    def resolve(self, source: Source, gradients: Sequence[Tensor | None] | None) -> None:
        """Take note of what came for a source. Never runs the engine."""
        if gradients is None:
            source.state = State.ABSENT
        else:
            source.state = State.GRADIENT
            source.gradients = gradients
        self._stirred.append(self._groups[source.group])

    def done_by_caller(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The caller has done what the engine would do for the roots: these gradients came out."""
        nodes = [get_gradient_edge(leaf).node for leaf in leaves]
        self.gradients.add(zip(nodes, gradients, strict=True))
        self._finish(self._groups[self.sources[ROOTS].group])

    def step(self) -> bool:
        """Run all that can run now; whether that was all. Then the hooks of leaves see the sums."""
        while self._stirred:
            group = self._stirred.pop()
            # Most groups have one source, and all is said with what it has come to.
            if len(group.sources) > 1:
                self._settle_absent_sources(group)
                while self._runnable(group):
                    self._run(group)
            elif group.sources[0].state is State.GRADIENT:
                while not group.done:
                    self._run(group)
            elif not group.done:
                self._finish(group)
        if self._left_tasks:
            self._drop_tasks()
        if self._open or self._closed:
            return self._closed
        self.gradients.settle(self._create)
        return True

    def close(self) -> None:
        """Let go of all: the traceback of what went wrong may keep this run, and what it ran, but
        not the activations. A run that has ended well just goes, as nothing in it is a cycle."""
        self._closed = True
        for group in self._groups:
            if group.stages is not None:
                self._drop_stages(group)
            group.sources, group.leaves, group.recvs = [], {}, []
        for source in self.sources.values():
            source.record = None
            source.start, source.gradients = (), ()
        self._groups, self._reached, self._current, self._stirred = [], {}, None, []
        self._fired, self._captured, self._recvs = {}, [], {}
        if self._left_tasks:
            self._drop_tasks()

    def _drop_tasks(self) -> None:
        """What a call that did not end left in the queue of this thread holds the graph."""
        self._left_tasks = False
        torch_private.drop_queued_tasks()

    # Called by nodes, from inside the engine.

    def take(self, message: int) -> Sequence[Tensor | None]:
        """The gradients of a pending send, for which the engine has stopped here."""
        source = self.sources[message]
        group = self._current
        assert group is not None
        assert group.stages is not None
        if source.state is State.PENDING:
            self._answer_unreachable(group)
            self._outlet.wait(source)
        if source.state is not State.GRADIENT or any(g is None for g in source.gradients):
            raise Suspend
        group.stages.entered |= source.bit
        return source.gradients

    def take_enclosed(self, message: int) -> Sequence[Tensor | None] | None:
        """The gradients of what a node sent from inside, which waits for them; None: none came."""
        source = self.sources.get(message)
        if source is None:
            raise _of_another_context()
        if source.state is State.PENDING:
            if self._current is not None:
                self._answer_unreachable(self._current)
            for enclosure in self._enclosing.values():
                for recv in enclosure.forgotten_recvs():
                    self._fire_absent(recv)
            self._outlet.wait_enclosed(source)
        return source.gradients if source.state is State.GRADIENT else None

    def fire(self, message: int, index: int, gradient: Tensor | None) -> None:
        """The gradient of one arrived tensor is complete; a message answers for all of its own."""
        record = self._recvs.get(message)
        if record is None:
            raise _of_another_context()
        count = len(record.nodes)
        if count == 1:
            assert message not in self._answered, "a recv ran twice"
            self._answered.add(message)
            if gradient is None:
                self._outlet.absent(message)
            else:
                self._outlet.gradient(message, (gradient,))
            return
        fired = self._fired.setdefault(message, {})
        assert index not in fired, "a recv ran twice"
        fired[index] = gradient
        if len(fired) < count:
            return
        del self._fired[message]
        self._answered.add(message)
        gradients = [fired[i] for i in range(count)]
        if all(each is None for each in gradients):
            self._outlet.absent(message)
        else:
            self._outlet.gradient(message, gradients)

    def pass_gate(self) -> None:
        """Let the leaves go if this call is the last one of its group."""
        group = self._current
        assert group is not None
        assert group.stages is not None
        resolved = group.stages.entered | group.stages.absent
        if group.stages.hooked_leaves or any(not s.bit & resolved for s in group.sources):
            raise Suspend

    # Absence.

    def _fire_absent(self, recv: Any) -> None:
        message, index = recv.message, recv.index
        if message not in self._answered and index not in self._fired.get(message, ()):
            self.fire(message, index, None)

    def _answer_unreached(self) -> None:
        for message, record in self._recvs.items():
            for index, recv in enumerate(record.nodes):
                if recv not in self._reached:
                    self.fire(message, index, None)

    def _answer_unreachable(self, group: Group) -> None:
        """Answer for the recvs that nothing will reach any more."""
        stages = group.stages
        if stages is None:
            return
        settled = stages.entered | stages.absent
        for recv in group.recvs:
            if not stages.masks[recv] & ~settled:
                self._fire_absent(recv)

    def _settle_absent_sources(self, group: Group) -> None:
        absent = group.mask_of(State.ABSENT)
        if not absent or group.done:
            return
        if absent == (1 << len(group.sources)) - 1:
            self._finish(group)
        elif group.recvs:
            stages = group.stages or make_stages(group, self._enclosing)
            for recv in group.recvs:
                if not stages.masks[recv] & ~absent:
                    self._fire_absent(recv)

    # Running.

    def _runnable(self, group: Group) -> bool:
        if group.done:
            return False
        pending = group.mask_of(State.PENDING)
        if not pending:
            return True
        if not group.mask_of(State.GRADIENT):
            return False
        stages = group.stages or make_stages(group, self._enclosing)
        absent, ran = group.mask_of(State.ABSENT), stages.ran
        # Not one test against both: a level that waited for an absent source can run now.
        return any(
            not level & pending and level & ~ran and level & ~absent for level in stages.levels
        )

    def _run(self, group: Group) -> None:
        if group.stages is None and self.brief and self._run_at_once(group):
            return
        self._current = group
        hooked = torch_private.hooked_leaves(group.leaves)
        held = self._held_leaves(hooked) if hooked else set()
        if held and group.stages is None:
            make_stages(group, self._enclosing)
        if group.stages is None:
            self._run_whole(group, hooked)
        else:
            self._run_staged(group, group.stages, held)

    def _run_at_once(self, group: Group) -> bool:
        """The most common case: all is there, there is little of it, and nothing hangs on it that
        has to be called. False: it is another case, and nothing was done."""
        if torch_private.node_hooks.ever:
            return False
        weighted = [
            (source.start, source.gradients)
            for source in group.sources
            if source.state is State.GRADIENT
        ]
        leaves, recvs = group.leaves, group.recvs
        found = self._in_engine(run_at_once, weighted, leaves, recvs)
        if found is None:
            return False
        flowed, to_recvs, sums = found
        # Others wait for these.
        for recv, gradient in zip(recvs, to_recvs, strict=True):
            self.fire(recv.message, recv.index, gradient)
        self.gradients.add_each(leaves, flowed, self._create)
        if sums:
            self.gradients.add(sums, self._create)
        group.done = True
        self._open -= 1
        return True

    def _held_leaves(self, hooked: list[Any]) -> set[Any]:
        """Leaves whose hooks run when the sum is accumulated for real, and must not run before."""
        return set(accumulating_for_real(hooked))

    def _run_whole(self, group: Group, hooked: list[Any]) -> None:
        """All is there, nothing was cut. Gradients leave from inside the engine."""
        edges: list[Edge] = []
        gradients: list[Tensor] = []
        sums: list[tuple[Any, Tensor]] = []
        for source in group.sources:
            for edge, gradient in source.weighted_edges():
                if type(edge[0]) is LeafNode and edge[0] not in hooked:
                    sums.append((edge[0], gradient))
                else:
                    edges.append(edge)
                    gradients.append(gradient)
        if edges:
            leaves = list(group.leaves)
            results = self._call(edges, gradients, leaves, group)
            self.gradients.add_each(leaves, results, self._create)
        if sums:
            self.gradients.add(sums, self._create)
        self._finish(group)

    def _run_staged(self, group: Group, stages: Stages, held: set[Any]) -> None:
        for source in group.sources:
            if source.state is State.GRADIENT and not source.bit & stages.entered:
                self._keep(stages, source.weighted_edges())
                stages.entered |= source.bit
        stages.absent = group.mask_of(State.ABSENT)
        waiting = [source for source in group.sources if source.state is State.PENDING]
        everything = (1 << len(group.sources)) - 1
        if not waiting and (not held or stages.ran == everything):
            self._run_last(group, stages, held)
            return
        before = stages.ran
        edges, gradients = self._roots(stages, held)
        leaves = list(group.leaves)
        self._add_blockers(stages, waiting, edges)
        gradients += [_ONE] * (len(edges) - len(gradients))
        self._hook_cuts(stages)
        self._captured = []
        try:
            results = self._call(edges, gradients, leaves, group)
        except Suspend:
            self._carry_over(group, stages, waiting)
            self._answer_unreachable(group)
            assert stages.ran != before, "a suspended call made no progress"
            return
        self.gradients.add_each(leaves, results, self._create)
        self.gradients.add(self._leaf_sums(stages, held), self._create)
        self._finish(group)

    def _run_last(self, group: Group, stages: Stages, held: set[Any]) -> None:
        """All sources are in: no call after this one."""
        edges, gradients = self._roots(stages, held)
        leaves = [leaf for leaf in group.leaves if leaf not in held]
        results = self._call(edges, gradients, leaves, group) if edges else ()
        self.gradients.add_each(leaves, results, self._create)
        self.gradients.add(self._leaf_sums(stages, held), self._create)
        self._finish(group)

    def _roots(self, stages: Stages, held: set[Any]) -> tuple[list[Edge], list[Tensor]]:
        edges = [edge for edge in stages.kept if not self._summed_here(edge[0], held)]
        return edges, [stages.kept[edge] for edge in edges]

    def _leaf_sums(self, stages: Stages, held: set[Any]) -> list[tuple[Any, Tensor]]:
        return [(e[0], g) for e, g in stages.kept.items() if self._summed_here(e[0], held)]

    def _summed_here(self, node: Any, held: Collection[Any]) -> bool:
        """An edge straight into a leaf needs no engine, unless the leaf has hooks to run there."""
        if type(node) is not LeafNode:
            return False
        return node in held or not torch_private.tensor_hooks(node.variable)

    def _add_blockers(self, stages: Stages, waiting: list[Source], edges: list[Edge]) -> None:
        """Pending sends, later made first: the order in which gradients come back."""
        places = [(source.message, source.node) for source in waiting]
        places += [(newest, node) for node, newest in stages.enclosing.items()]
        for place, (_, node) in enumerate(sorted(places, key=lambda item: item[0]), start=1):
            assert node is not None
            torch_private.set_sequence_number(node, place)
        edges += [(source.node, 0) for source in waiting]
        if stages.gate is not None:
            edges.append((stages.gate.grad_fn, 0))

    def _hook_cuts(self, stages: Stages) -> None:
        if stages.handles:
            return
        for node, cut in stages.cuts.items():
            places = [place for place, _, _ in cut]

            def keep(inputs: Any, _: Any, cut: Any = cut, places: list[int] = places) -> None:
                if engine_thread.running is self:
                    self._captured.append((cut, [inputs[i] for i in places]))

            stages.handles.append(node.register_hook(torch_private.OwnHook(keep)))

    def _call(
        self, edges: list[Edge], gradients: list[Tensor], leaves: list[Any], group: Group
    ) -> Sequence[Tensor | None]:
        """Run from these edges; the gradients of the leaves."""
        if not leaves and not group.recvs:
            return ()
        # The engine runs only what leads to an input.
        ends = leaves
        if self._enclosing:
            ends = [*leaves, *[leaf for leaf in self._enclosing if leaf in self._reached]]
        inputs = (anchor(),) if group.recvs else ()
        run = torch_private.run_engine
        results: Sequence[Tensor | None] = self._in_engine(run, edges, gradients, ends, inputs)
        return results[: len(leaves)]

    def _in_engine(self, run: Callable[..., Any], *what: Any) -> Any:
        """Run the engine, as its nodes know us meanwhile."""
        previous = engine_thread.running
        engine_thread.running = self
        self._left_tasks = True
        try:
            results = run(*what, self._retain, self._create)
        except RuntimeError as error:
            _explain_reentrant_checkpoint(error)
            raise
        finally:
            engine_thread.running = previous
        self._left_tasks = False
        return results

    def run_aside(
        self, roots: list[tuple[Edge, Tensor]], leaves: list[Any]
    ) -> Sequence[Tensor | None]:
        """Called by a node: run a graph that belongs to it alone, and capture it at its leaves."""
        edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
        return torch_private.run_engine(edges, gradients, leaves, (), self._retain, self._create)

    def _keep(self, stages: Stages, weighted: list[tuple[Edge, Tensor]]) -> None:
        kept = stages.kept
        with torch.set_grad_enabled(self._create):
            for edge, gradient in weighted:
                kept[edge] = add(kept.get(edge), gradient)

    def _carry_over(self, group: Group, stages: Stages, waiting: list[Source]) -> None:
        """After a suspension: only what flows into nodes that have not run is still to come."""
        stages.ran = stages.entered | stages.absent

        def to_come(node: Any) -> bool:
            return node in group.leaves or bool(stages.masks[node] & ~stages.ran)

        stages.kept = {e: g for e, g in stages.kept.items() if to_come(e[0])}
        for source in waiting:
            if source.bit & stages.entered:
                edges = source.weighted_edges()
                self._keep(stages, [(e, g) for e, g in edges if to_come(e[0])])
        captured, self._captured = self._captured, []
        for cut, gradients in captured:
            for (_, node, index), gradient in zip(cut, gradients, strict=True):
                if gradient is not None and to_come(node):
                    self._keep(stages, [((node, index), gradient)])

    def _finish(self, group: Group) -> None:
        group.done = True
        self._open -= 1
        for recv in group.recvs:
            if recv.message not in self._answered:
                self._fire_absent(recv)
        if group.stages is not None:
            self._drop_stages(group)

    def _drop_stages(self, group: Group) -> None:
        assert group.stages is not None
        for handle in group.stages.handles:
            handle.remove()
        group.stages = None


def run_in_python(
    weighted: Sequence[tuple[Any, Sequence[Tensor | None]]],
    leaves: Collection[Any],
    recvs: Collection[Any],
    retain_graph: bool,
    create_graph: bool,
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None], list[tuple[Any, Tensor]]] | None:
    """What flows from these starts to the leaves, what flows to the recvs, whose nodes are not run
    (hooks on them would not be called), and what goes straight into leaves. None: a leaf has hooks,
    and nothing was run."""
    if torch_private.hooked_leaves(leaves):
        return None
    edges: list[Edge] = []
    flowing: list[Tensor] = []
    sums: list[tuple[Any, Tensor]] = []
    for start, gradients in weighted:
        for edge, gradient in zip(edges_of(start), gradients, strict=True):
            if gradient is None or edge[0] is None:
                continue
            if type(edge[0]) is LeafNode:
                sums.append((edge[0], gradient))
            else:
                edges.append(edge)
                flowing.append(gradient)
    ends = [*leaves, *recvs]
    if not (edges and ends):
        return (None,) * len(leaves), (None,) * len(recvs), sums
    results = torch_private.run_engine(edges, flowing, ends, (), retain_graph, create_graph)
    return results[: len(leaves)], results[len(leaves) :], sums


run_at_once = run_in_python if compiled is None else compiled.run


def _explain_reentrant_checkpoint(error: RuntimeError) -> None:
    if "Checkpointing is not compatible" in str(error) or "use_reentrant=True" in str(error):
        raise AutogradError(
            "torch.utils.checkpoint with use_reentrant=True writes to .grad by itself and cannot "
            "take part in a distributed backward pass. Use use_reentrant=False."
        ) from error


def _of_another_context() -> AutogradError:
    return AutogradError(
        "Backward reached a tensor that came in a call of another autograd context. Give backward "
        "the id of the context in which the calls were made."
    )
