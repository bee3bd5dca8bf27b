"""Calls that are under way from inside of compiled functions.

A graph can hold tensors only, so a call is known in it by a *token*: a float64 number, the call's
id. The record of a call lives as long as the memory of its token: autograd
saves the token for the backward pass, and when the graph goes, the call is forgotten.

Being a float tensor, the token can carry the autograd edge from the node that makes a call to the
node that waits for it.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from telegrad.autograd.context import Context, current_context, working_in
from telegrad.autograd.crossing import engine_thread
from telegrad.autograd.enclosed import EnclosedCall
from telegrad.autograd.errors import AutogradError
from telegrad.rpc.errors import TelegradError

_ids = itertools.count(1)
_records: dict[int, tuple[Any, weakref.ref[Any]]] = {}
atexit.register(_records.clear)  # What they release is still there then.


def new_token(record: Any) -> Tensor:
    """A token that keeps `record` while its memory lives."""
    number = next(_ids)
    memory = numpy.array([number], dtype=numpy.float64)
    _records[number] = record, weakref.ref(memory, functools.partial(_forget, number))
    return torch.from_numpy(memory)


def _forget(number: int, _: object) -> None:
    record, _ = _records.pop(number)
    if isinstance(record, Call) and record.enclosed is not None:
        record.enclosed.forgotten = True


def record_of(token: Tensor) -> Any:
    found = _records.get(int(token.item()))
    if found is None:
        raise TelegradError(
            "A compiled function refers to a call or context that is gone: a reference or a future "
            "that it made was used after its job ended, or its token was copied."
        )
    return found[0]


def live_records() -> int:
    return len(_records)


@dataclass(slots=True, eq=False)
class Call:
    """One call of one run of a compiled function."""

    where: str
    enclosed: EnclosedCall | None
    sent: list[int]
    """The places of the tensors that need a gradient, in the order in which gradients come."""
    future: Any = None
    reference: Any = None
    places: dict[int, Any] | None = None
    """Where in the outputs the recv of each tensor that needs a gradient is."""

    @property
    def context(self) -> Context | None:
        return None if self.enclosed is None else self.enclosed.context

    # Forward.

    def take(self, outputs: list[Tensor]) -> list[Tensor]:
        """Note what arrived; the same as plain tensors."""
        self.places = {
            place: output.grad_fn
            for place, output in enumerate(outputs)
            if output.grad_fn is not None
        }
        if self.enclosed is not None:
            self.enclosed.arrived(outputs)
        return [output.detach() for output in outputs]

    # Backward.

    def fire(self, gradients: dict[int, Tensor]) -> None:
        """The gradients of what arrived are complete."""
        running = self._running()
        for place, node in (self.places or {}).items():
            running.fire(node.message, node.index, gradients.get(place))

    def await_gradients(self) -> dict[int, Tensor]:
        """The gradients of what left, by its place among the sent tensors."""
        if self.enclosed is None or self.enclosed.message is None:
            self._running()
            return {}
        found = self._running().take_enclosed(self.enclosed.message)
        if found is None:
            return {}
        pairs = zip(self.sent, found, strict=True)
        return {place: gradient for place, gradient in pairs if gradient is not None}

    def _running(self) -> Any:
        if self.enclosed is None:
            raise AutogradError(
                f"Backward reached a remote call ({self.where}) that was made outside of an "
                "autograd context. Enter `with telegrad.autograd.context() as context_id:` before "
                "the forward pass."
            )
        running = engine_thread.running
        if running is None:
            raise AutogradError(
                f"A local backward reached a remote call ({self.where}): the graph goes on there. "
                "Use telegrad.autograd.backward(context_id, [loss]) instead of loss.backward()."
            )
        return running


class Anchors:
    """The leaf by which the graph node of a compiled function is known to the engine.

    Every run of a compiled function that makes calls in a context should have an anchor of its own.
    Compiled functions read `current`; the first call in a run puts a new one there for the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_memory: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.current = self._new()

    def _new(self) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        self._by_memory[anchor.data_ptr()] = anchor
        return anchor

    def take(self, seen: Tensor) -> Tensor:
        """The anchor that a kernel sees; what it sees may be an alias."""
        with self._lock:
            anchor = self._by_memory[seen.data_ptr()]
            if anchor is self.current:
                self.current = self._new()
            return anchor


anchors = Anchors()


def begin(
    where: str,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    anchor: Tensor,
    context: Context | None,
    record: bool,
    send: Callable[[list[Tensor]], Any],
) -> tuple[Call, Any]:
    """Make a call from inside of a compiled function: `send` makes it with the tensors it is given.

    They are copies, because compiled code uses memory again as soon as its last reader has run.
    """
    context = context if context is not None else current_context()
    with torch.no_grad():
        leaving = [tensor.clone() for tensor in tensors]
    if context is None:
        return Call(where, None, []), send(leaving)
    enclosed = EnclosedCall(context, anchors.take(anchor))
    for tensor, need in zip(leaving, needs, strict=True):
        tensor.requires_grad_(need and record)
    # In the eyes of the rpc layer the call belongs to the context; it asks for its scopes only.
    with torch.set_grad_enabled(record), working_in(cast(Context, enclosed)):
        result = send(leaving)
    places = {id(tensor): place for place, tensor in enumerate(leaving)}
    sent = [places[id(tensor)] for tensor in enclosed.tensors]
    enclosed.tensors = []
    return Call(where, enclosed, sent), result
