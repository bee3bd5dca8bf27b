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
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from telegrad.autograd.context import Context, begin_work_in, current_context, end_work
from telegrad.autograd.enclosed import EnclosedCall, Enclosure
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.nodes import engine_thread
from telegrad.compile import torch_private
from telegrad.compile.own import OwnCall
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.futures import CallFuture
from telegrad.rpc.node import Node

if TYPE_CHECKING:
    from telegrad.compile.sites import Site

Arguments = Callable[["Site", Sequence[Tensor], Sequence[int]], tuple[Any, dict[str, Any]]]

_ids = itertools.count(1)
_records: dict[int, tuple[Any, weakref.ref[Any]]] = {}
_by_address: dict[int, Any] = {}
"""The same by the memory of their tokens. To look at an address is cheaper than to read a value,
and nothing else can be there while the record is."""


@atexit.register
def _let_go() -> None:
    """What the records release is still there then."""
    _by_address.clear()
    _records.clear()


def new_token(record: Any) -> Tensor:
    """A token that keeps `record` while its memory lives."""
    number = next(_ids)
    memory = array("d", (number,))
    token = torch.frombuffer(memory, dtype=torch.float64)
    address = token.data_ptr()
    forget = functools.partial(_forget, number, address)
    _records[number] = record, weakref.ref(memory, forget)
    _by_address[address] = record
    return token


def _forget(number: int, address: int, _: object) -> None:
    _by_address.pop(address, None)
    record, _ = _records.pop(number)
    if isinstance(record, Call):
        record.end()
        if record.enclosed is not None:
            record.enclosed.forgotten = True


def record_of(token: Tensor) -> Any:
    record = find_record(token)
    if record is None:
        raise TelegradError(
            "A compiled function refers to a call or context that is gone: a reference or a future "
            "that it made was used after its job ended, or its token was copied."
        )
    return record


def find_record(token: Tensor) -> Any | None:
    """The record of a token, or of a copy of one."""
    record = _by_address.get(token.data_ptr())
    if record is None:
        found = _records.get(int(token.item()))
        record = None if found is None else found[0]
    return record


def live_records() -> int:
    return len(_records)


@dataclass(slots=True, eq=False)
class Call:
    """One call of one run of a compiled function."""

    where: str
    enclosed: EnclosedCall | None
    sent: Sequence[int]
    """The places of the tensors that need a gradient, in the order in which gradients come."""
    own: bool = False
    """The call is one of the worker that makes it to itself."""
    here: OwnCall | None = None
    """If so, and if gradients may flow through it: its graph."""
    future: CallFuture | None = None
    reference: Any = None
    changed: Tensor | None = None
    """Outside of contexts: what the compiled function reads, and its worker has changed here."""
    places: dict[int, Any] | None = None
    """Where in the outputs the recv of each tensor that needs a gradient is."""

    @property
    def context(self) -> Context | None:
        return None if self.enclosed is None else self.enclosed.context

    # Forward.

    def outside(self, node: Node, site: Site, send: Any, own: list[Tensor], ints: Any) -> Any:
        """Make the call in no context."""
        if node.around_calls is None:
            node.around_calls = _Looking
        _outside[id(self)] = self, site, threading.get_ident()
        try:
            return send(site, own, ints)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Nobody waits for it any more."""
        _outside.pop(id(self), None)

    def result_of(self, given: Any) -> Any:
        """What the call returned, which another worker gives, or has been put aside here."""
        return given if self.here is None else self.here.result

    def take(self, outputs: list[Tensor]) -> list[Tensor]:
        """Note what arrived; the same as plain tensors."""
        self.end()
        if self.changed is not None:
            raise _changed(self.where, self.changed)
        if self.here is not None:
            plain = self.here.take(outputs, anchors.has)
            self._notice_changes()
            return plain
        self.places = {
            place: node
            for place, output in enumerate(outputs)
            if (node := output.grad_fn) is not None
        }
        if self.places and self.own:
            raise _to_itself(self.where)
        if self.enclosed is not None:
            self._notice_changes()
            self.enclosed.arrived(outputs)
        return [output.detach() for output in outputs]

    @property
    def differentiable(self) -> Container[int]:
        """The places of the outputs through which gradients would flow."""
        return self.here.differentiable if self.here is not None else self.places or ()

    def _notice_changes(self) -> None:
        enclosure = None if self.enclosed is None else self.enclosed.enclosure
        if enclosure is not None and enclosure.changed is not None:
            changed, enclosure.changed = enclosure.changed, None
            raise _changed(self.where, changed)

    # Backward.

    def fire(self, gradients: dict[int, Tensor]) -> None:
        """The gradients of what arrived are complete."""
        running = self._running()
        if self.here is not None:
            self.here.fire(gradients)
            return
        for place, node in (self.places or {}).items():
            running.fire(node.message, node.index, gradients.get(place))

    def await_gradients(self) -> dict[int, Tensor]:
        """The gradients of what left, by its place among the sent tensors."""
        if self.here is not None:
            return self.here.differentiate(self._running())
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


_outside: dict[int, tuple[Call, Site, int]] = {}
"""Calls under way in no context, with the threads that run the compiled functions."""


class _Looking:
    """Around what a worker calls here in no context, perhaps because it was called: note what it
    changes of what compiled functions read that wait for it."""

    __slots__ = ("_before",)

    def __init__(self, sender: int) -> None:
        self._before = [
            (call, site.reads.versions(thread))
            for call, site, thread in list(_outside.values())
            if site.worker.id == sender
        ]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for call, versions in self._before:
            for tensor, version in versions:
                if tensor._version != version:
                    call.changed = tensor


class Anchors:
    """The leaf by which the graph node of a compiled function is known to the engine.

    Every run of a compiled function that makes calls in a context should have an anchor of its own
    in that context. Compiled functions read `current`; the first call in a run puts another there
    for the next. An anchor serves again when its context is over: no pass of another one looks for
    the calls of a context that is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_memory: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._spare: list[tuple[Tensor, Any]] = []
        """Anchors that may serve again, with their graph nodes."""
        self._leaf: Any = None
        self.current = self._new()

    def _new(self) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        self._by_memory[anchor.data_ptr()] = anchor
        return anchor

    def take(self, seen: Tensor) -> tuple[Tensor, Any]:
        """The anchor that a kernel sees, and its graph node if it is known. What the kernel sees
        may be an alias."""
        address = seen.data_ptr()
        with self._lock:
            taken, leaf = self.current, self._leaf
            if address != taken.data_ptr():
                return self._by_memory[address], None
            self.current, self._leaf = self._spare.pop() if self._spare else (self._new(), None)
            return taken, leaf

    def give_back(self, enclosures: Iterable[Enclosure]) -> None:
        """The context that these belong to is over."""
        with self._lock:
            for enclosure in enclosures:
                anchor = enclosure.anchor
                taken = anchor is self.current or any(anchor is a for a, _ in self._spare)
                if not taken and len(self._spare) < _SPARE:
                    self._spare.append((anchor, enclosure.leaf))

    def has(self, leaf: Tensor) -> bool:
        """Whether a leaf is an anchor, of which no gradient is wanted."""
        return type(leaf) is Tensor and leaf.data_ptr() in self._by_memory


_SPARE = 8
anchors = Anchors()

_COPIED_AT_ONCE = 1 << 15
"""Bytes. The rpc layer keeps larger tensors in their own memory, for the case that a message has to
be sent again; smaller ones it has copied when it has sent them."""


def leaving(tensor: Tensor) -> Tensor:
    """A tensor that may be sent. Compiled code uses its memory again as soon as its last reader has
    run, and does not tell anyone."""
    return tensor.detach() if tensor.nbytes <= _COPIED_AT_ONCE else tensor.detach().clone()


def _all_leaving(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `leaving`. Whether two of them share memory is up to the code that made them, and the
    receiver must not depend on it."""
    if len(tensors) < 2:
        return list(map(leaving, tensors))
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        found.append(tensor.detach().clone() if memory in seen else leaving(tensor))
        seen.add(memory)
    return found


def begin(
    site: Site,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    needs: Sequence[bool],
    anchor: Tensor,
    context: Context | None,
    record: bool,
    send: Callable[[Site, list[Tensor], Sequence[int]], Any],
    arguments: Arguments | None = None,
) -> tuple[Call, Any]:
    """Make a call from inside of a compiled function: `send` makes it with the tensors it is given,
    which are its own. `arguments` puts those of the function together, if its result comes here."""
    if context is None:
        context = current_context()
    node = current_node()
    if node.is_lost(site.worker.id):
        site.follow(node)
    own = _all_leaving(tensors)
    if context is None:
        call = Call(site.name, None, ())
        return call, call.outside(node, site, send, own, ints)
    enclosed = EnclosedCall(context, *anchors.take(anchor))
    enclosed.enclosure.reads = site.reads
    enclosed.enclosure.thread = threading.get_ident()
    sent: list[int] = []
    if record:
        for place, need in enumerate(needs):
            if need:
                own[place].requires_grad_()
                sent.append(place)
    own_worker = site.worker.id == node.info.id
    if own_worker and record and arguments is not None:
        return _begin_here(site, own, ints, enclosed, send, arguments)
    if sent and own_worker:
        raise _to_itself(site.name)
    # In the eyes of the rpc layer the call belongs to the context; it asks for its scopes only.
    outside = begin_work_in(cast(Context, enclosed))
    mode = torch.is_grad_enabled()
    if mode is not record:
        torch_private.set_grad_mode(record)
    try:
        result = send(site, own, ints)
    finally:
        if mode is not record:
            torch_private.set_grad_mode(mode)
        end_work(outside)
    return Call(site.name, enclosed, _in_order(sent, own, enclosed), own_worker), result


def _begin_here(
    site: Site,
    own: list[Tensor],
    ints: Sequence[int],
    enclosed: EnclosedCall,
    send: Callable[[Site, list[Tensor], Sequence[int]], Any],
    arguments: Arguments,
) -> tuple[Call, Any]:
    """Make a call to this worker itself. Only a number is sent, in no context."""

    function = site.function  # It may be gone when the call runs, if nobody waits for it.

    def run(tensors: list[Tensor]) -> Any:
        args, kwargs = arguments(site, tensors, ints)
        return function(*args, **kwargs)

    copies = [t.clone().requires_grad_() if t.requires_grad else t.clone() for t in own]
    here = OwnCall(site.name, run, enclosed.context, copies)
    outside = begin_work_in(None)
    try:
        result = send(site.to_itself, [], [here.number])
    except BaseException:
        here.give_up()
        raise
    finally:
        end_work(outside)
    return Call(site.name, enclosed, (), True, here), result


def _changed(where: str, tensor: Tensor) -> TelegradError:
    return TelegradError(
        f"While a compiled function waited for a call ({where}), a function that was called back "
        f"changed a tensor of shape {tuple(tensor.shape)} that the compiled function reads. It may "
        "have read it before, or only then. Return the new value from the call instead, or make "
        "this call outside of the compiled function."
    )


def _to_itself(where: str) -> AutogradError:
    """The backward pass would wait inside of a graph node for what only its own thread can do."""
    return AutogradError(
        f"A compiled function makes a reference ({where}) on its own worker, or takes what is "
        "behind one, through which gradients would flow. Call the function itself, without rpc, or "
        "make this call outside of the compiled function."
    )


def _in_order(sent: list[int], own: list[Tensor], enclosed: EnclosedCall) -> Sequence[int]:
    """The places of the tensors that left, in the order in which they did."""
    left, enclosed.tensors = enclosed.tensors, []
    if len(left) == 1 and len(sent) == 1:
        return sent
    places = {id(tensor): place for place, tensor in enumerate(own)}
    return [places[id(tensor)] for tensor in left]
