"""Tensors that leave and arrive: the graph around them, and the note beside them."""

from __future__ import annotations

import pytest
import torch

from telegrad.autograd.context import current_context, current_scope, refuse_nested, working_in
from telegrad.autograd.crossing import AutogradCrossing, Note
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.nodes import RecvNode, SendNode
from tests.autograd.harness import Workers

CROSSING = AutogradCrossing()


@pytest.mark.parametrize(
    "note",
    [
        Note(5),
        Note(5, recording=False),
        Note((7 << 48) + 1, (65535 << 48) + 3, (0, 2, 70000), (1 << 48 | 1, 2)),
        Note(1, 2, (0,)),
        Note(5, alone=True),
        Note(5, recording=False, alone=True),
        Note(1, 2, (0,), alone=True),
    ],
)
def test_a_note_is_read_as_it_was_written(note: Note) -> None:
    assert Note.unpack(note.pack()) == note


@pytest.mark.parametrize("data", [b"\x01", b"\x00" * 19, Note(1, 2, (0,), (3,)).pack()[:22]])
def test_a_damaged_note_is_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises(AutogradError, match="cannot be read"):
        Note.unpack(data)


def test_a_note_that_names_tensors_which_are_not_there_is_refused() -> None:
    workers = Workers(2)
    note = Note(workers.context_id, 9, (3,)).pack()
    with pytest.raises(
        AutogradError, match="from worker 'worker0' says that its tensor 3 needs gradient"
    ):
        CROSSING.arriving(workers.nodes[1], 0, note, [torch.ones(1)])


def test_a_send_has_one_edge_for_each_tensor_that_needs_gradient_in_order() -> None:
    workers = Workers(2)
    a, b, constant = (
        torch.ones(2, requires_grad=True),
        torch.ones(3, requires_grad=True),
        torch.ones(1),
    )
    workers.cross(0, 1, [a, constant, b])
    (send,) = workers.context(0).sends.values()
    assert type(send.node) is SendNode
    edges = send.node.next_functions
    assert [node.variable is leaf for (node, _), leaf in zip(edges, [a, b], strict=True)] == [
        True
    ] * 2
    assert [place for _, place in edges] == [0, 0]


def test_tensors_of_one_message_have_equal_nodes_and_others_do_not() -> None:
    workers = Workers(2)
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = workers.cross(0, 1, [a, b])
    (third,) = workers.cross(0, 1, [a])
    assert first.grad_fn == second.grad_fn
    assert first.grad_fn != third.grad_fn
    assert first.grad_fn is not second.grad_fn
    assert len({first.grad_fn, second.grad_fn}) == 2
    (recv, other) = workers.context(1).recvs.values()
    assert type(first.grad_fn) is RecvNode
    assert recv.nodes[0] == first.grad_fn
    assert other.nodes[0] == third.grad_fn


def test_a_message_without_gradients_leaves_no_node_but_the_context_arrives() -> None:
    workers = Workers(2)
    (x,) = workers.cross(0, 1, [torch.ones(2)])
    assert x.grad_fn is None
    assert not workers.context(0).sends
    assert not workers.context(1).recvs
    assert workers.context(0).known_workers == {1}
    assert workers.context(1).known_workers == {0}


def test_without_a_note_a_tensor_stays_as_it_came() -> None:
    workers = Workers(2)
    x = torch.ones(2, requires_grad=True)
    (arrived,), scope = CROSSING.arriving(workers.nodes[1], 0, b"", [x])
    assert arrived is x
    assert scope is None


def test_under_no_grad_nothing_is_recorded_and_the_function_runs_without_grad() -> None:
    workers = Workers(2)
    with workers.at(0), torch.no_grad():
        scope = current_scope()
        note = CROSSING.leaving(workers.nodes[0], 1, [torch.ones(2, requires_grad=True)], scope)
    assert not workers.context(0).sends
    _, there = CROSSING.arriving(workers.nodes[1], 0, note, [torch.ones(2)])
    assert torch.is_grad_enabled()
    with CROSSING.enter(workers.nodes[1], there):
        assert not torch.is_grad_enabled()
        assert current_context() is workers.context(1)
    assert torch.is_grad_enabled()
    assert current_context() is None


def test_no_grad_at_the_receiver_does_not_cut_what_was_recorded_by_the_sender() -> None:
    workers = Workers(2)
    with torch.no_grad():
        scope = workers.context(0).recording
        x = torch.ones(2, requires_grad=True)
        note = CROSSING.leaving(workers.nodes[0], 1, [x], scope)
        (arrived,), _ = CROSSING.arriving(workers.nodes[1], 0, note, [torch.ones(2)])
    assert type(arrived.grad_fn) is RecvNode


def test_what_leaves_after_the_release_carries_no_note() -> None:
    workers = Workers(2)
    scope = workers.context(0).recording
    workers.release()
    assert CROSSING.leaving(workers.nodes[0], 1, [torch.ones(2, requires_grad=True)], scope) == b""


def test_an_arrived_tensor_can_be_changed_in_place() -> None:
    workers = Workers(2)
    x = torch.ones(3, requires_grad=True)
    (there,) = workers.cross(0, 1, [x * 2])
    there.mul_(3)
    there[0].add_(1)
    (back,) = workers.cross(1, 0, [there])
    workers.backward(0, [back.sum()])
    assert torch.equal(workers.gradient(0, x), torch.full((3,), 6.0))


def test_a_local_backward_over_a_crossing_says_what_to_do() -> None:
    workers = Workers(2)
    (there,) = workers.cross(0, 1, [torch.ones(3, requires_grad=True)])
    with pytest.raises(AutogradError, match=r"came from worker 0.*telegrad\.autograd\.backward"):
        there.sum().backward()


def test_contexts_do_not_nest() -> None:
    workers = Workers(1)
    with (
        working_in(workers.context(0)),
        pytest.raises(AutogradError, match="Already have an autograd context id for this thread"),
    ):
        refuse_nested()
    refuse_nested()
