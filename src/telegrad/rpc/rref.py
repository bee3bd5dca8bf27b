"""References to values on other workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch.compiler import is_dynamo_compiling

from telegrad.rpc.arguments import check_bound
from telegrad.rpc.calls import Method, Pending, without_frames
from telegrad.rpc.current import current_node, not_initialized
from telegrad.rpc.errors import (
    CallTimeout,
    LostWithWorker,
    ReferenceLost,
    TelegradError,
    WorkerLost,
)
from telegrad.rpc.futures import CallFuture, begin_async
from telegrad.rpc.loans import take_all
from telegrad.rpc.methods import call_parcel, call_without_arguments
from telegrad.rpc.node import Node
from telegrad.rpc.outside import refuse_in_graph
from telegrad.rpc.passage import Passage
from telegrad.rpc.reference_messages import (
    ForkId,
    Handle,
    ReferenceId,
    Transfer,
    read_reference,
    read_transfer,
)
from telegrad.rpc.references import State
from telegrad.rpc.results import as_result
from telegrad.rpc.value_requests import method_of
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.codec import Packed, Trust, export, extend
from telegrad.wire.parcel import Parcel

T = TypeVar("T")
INVOKE = "invoke"
"""The operation that calls a method of a value."""


class RRef(Generic[T]):
    """A reference to a value that lives on its owner.

    `RRef(value)` makes the calling worker the owner; `rpc.remote` runs a function on another worker
    and gives a reference to what it returns. References can be sent to other workers, as arguments,
    results or inside of containers. The owner keeps the value while any live worker has a reference
    and drops it when the last one goes.

        >>> rref = rpc.RRef(torch.ones(2))          # doctest: +SKIP
        >>> rref.is_owner(), rref.local_value()     # doctest: +SKIP
        (True, tensor([1., 1.]))
    """

    __slots__ = ("__weakref__", "_creation", "_handle", "_node", "_reference")

    def __init__(self, value: T) -> None:
        if is_dynamo_compiling():
            raise TelegradError(
                "A reference to a value of this worker cannot be made in a compiled function: make "
                "it outside, or use rpc.remote."
            )
        node = current_node()
        self._take(node, reference := node.values.keep(value), reference)

    def _take(self, node: Node, reference: ReferenceId, handle: Handle) -> None:
        self._node = node
        self._reference = reference
        self._handle = handle
        self._creation: Pending | None = None

    @classmethod
    def _of(cls, node: Node, reference: ReferenceId, handle: Handle) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._take(node, reference, handle)
        return rref

    def __del__(self) -> None:
        node = getattr(self, "_node", None)
        if node is not None and not node.closed:
            node.values.died(self._handle)

    # Who owns it.

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        if is_dynamo_compiling():
            info: WorkerInfo = _traced().worker_info(self._reference.owner)
            return info
        return self._node.members.member(self._reference.owner).info

    def owner_name(self) -> str:
        return self.owner().name

    def is_owner(self) -> bool:
        return self._reference.owner == self._node.info.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference."""
        if is_dynamo_compiling():
            raise TelegradError(
                "Whether a reference is confirmed changes by itself and cannot be a part of a "
                "graph: ask outside of the compiled function."
            )
        return self._node.values.confirmed(self._handle)

    # The value.

    def local_value(self) -> T:
        """The value itself, on its owner."""
        refuse_in_graph("The value behind a reference (local_value)")
        if not self.is_owner():
            raise TelegradError(
                f"For {self!r}, can't call localValue() on user {self._node.info!r}. "
                f"Call it on owner {self.owner()!r}, or use to_here()."
            )
        value: T = self._node.values.value(self._reference)
        return value

    def to_here(self, timeout: float | None = None) -> T:
        """A copy of the value on this worker; on the owner the value itself.

        Waits until the value is there. `timeout` in seconds, 0 for ever, by default the job's.
        """
        if is_dynamo_compiling():
            traced: T = _traced().to_here(self, timeout)
            return traced
        self._check_usable("to_here()")
        if self.is_owner():
            limit = self._node.timeout if timeout is None else timeout
            check_bound("timeout", limit)
            value: T = self._node.values.value(self._reference, limit)
            return value
        return self._node.wait(begin_fetch(self, timeout))  # type: ignore[no-any-return]

    def _check_usable(self, what: str) -> None:
        node, creation = self._node, self._creation
        if node.closed or node.values.lost or (creation is not None and creation.error is not None):
            self._refuse_unusable(what)

    def _refuse_unusable(self, what: str) -> None:
        """As `_check_usable`, where there may be something to refuse."""
        if self._node.closed:
            raise not_initialized(
                f"{self!r} belongs to a job that has been shut down: {what} failed"
            )
        loss = self._node.values.loss(self._handle)
        if isinstance(loss, WorkerLost):
            raise LostWithWorker.of(
                self.owner_name(), loss.cause, f"{what} of a value that it owns"
            )
        if loss is not None:
            raise ReferenceLost(f"The value on worker {self.owner_name()!r} is gone: {loss}")
        creation = self._creation
        if creation is not None and creation.done and creation.error is not None:
            failure = type(creation.error)(
                f"RRef creation via rpc.remote() failed before {what}: {creation.error}"
            )
            failure.__dict__.update(creation.error.__dict__)
            raise failure

    # Calls of its methods.

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """A proxy: `rref.rpc_sync().method(*args)` calls the value's method on the owner."""
        if is_dynamo_compiling():
            return _traced().MethodsOf(self, timeout, 0)
        return Proxy(self, timeout, _invoke_sync)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """As `rpc_sync`, but each call gives a future."""
        if is_dynamo_compiling():
            return _traced().MethodsOf(self, timeout, 1)
        return Proxy(self, timeout, begin_method_async)

    def remote(self, timeout: float | None = None) -> Any:
        """As `rpc_sync`, but each call gives a reference to its result."""
        if is_dynamo_compiling():
            return _traced().MethodsOf(self, timeout, 2)
        return Proxy(self, timeout, _invoke_remote)

    def backward(self, context_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the tensor behind this reference, on its owner.

        In a distributed autograd context the gradients go to that context on every worker. Without
        one (on the owner only) it is `tensor.backward()`.
        """
        if is_dynamo_compiling():
            raise TelegradError(
                "RRef.backward cannot be a part of a graph: call it outside of the compiled "
                "function."
            )
        self._node.services["autograd"].backward_from(self, context_id, retain_graph)

    # As an object.

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RRef):
            return NotImplemented
        if is_dynamo_compiling():
            return bool(_traced().same_reference(self, other))
        return self._reference == other._reference

    def __hash__(self) -> int:
        return hash(self._reference)

    def __repr__(self) -> str:
        reference = _unique_id(self._reference)
        if isinstance(self._handle, ForkId):
            return f"UserRRef(RRefId = {reference}, ForkId = {_unique_id(self._handle)})"
        return f"OwnerRRef({reference})"

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
            "send it as an argument or a result of a call."
        )


def _traced() -> Any:
    """The same for Dynamo, which makes nodes of a graph of calls."""
    from telegrad.compile import traced

    return traced


def _unique_id(handle: Handle) -> str:
    return f"GloballyUniqueId(created_on={handle.created_on}, local_id={handle.number})"


def remote_reference(
    node: Node,
    to: WorkerInfo,
    target: Callable[..., object],
    args: tuple[object, ...] | list[object],
    kwargs: dict[str, object] | None,
    timeout: float | None,
    cls: type[RRef[Any]] = RRef,
    on_created: Callable[[Pending], None] | None = None,
    write: Callable[[Transfer], Parcel | None] | None = None,
) -> RRef[Any]:
    """Run `target` on a worker and refer to what it returns.

    `on_created` runs when the owner has answered, or could not in its time. `write` says how to
    ask another worker for it without a tree, if that can be done.
    """
    if to.id == node.info.id:
        reference = node.values.promise_own()
        rref = cls._of(node, reference, reference)
        rref._creation = node.call(
            to,
            "fill",
            (tuple(reference), target, args, kwargs or {}),
            None,
            timeout,
            on_created or _nothing,
        )
        rref._creation.target = target
        return rref
    created = node.values.name_remote(to.id)

    def settled(pending: Pending) -> None:
        _settle_creation(node, to, created, pending)
        if on_created is not None:
            on_created(pending)

    late = partial(_end_creation, node, to, created)
    try:
        written = None if write is None else write(created)
        request: tuple[object, ...] = ()
        if written is None:
            data = (tuple(created.reference), tuple(created.fork))
            request = (data, target, args, kwargs or {})
        creation = node.call(to, "create", request, None, timeout, settled, written, on_late=late)
    except BaseException:
        node.values.abandon(created)
        raise
    rref = cls._of(node, created.reference, created.fork)
    rref._creation = creation
    creation.target = target
    return rref


def _settle_creation(node: Node, to: WorkerInfo, created: Transfer, pending: Pending) -> None:
    if isinstance(pending.error, CallTimeout):
        return  # What the owner says later ends it, or that the request never left.
    problem: BaseException | None = None
    try:
        node.outcome(pending)
    except BaseException as error:
        problem = without_frames(error)
    _end_creation(node, to, created, problem)


def _end_creation(
    node: Node, to: WorkerInfo, created: Transfer, problem: BaseException | None
) -> None:
    """If the owner could not read the request, tell it in words it can that there is no value."""
    if problem is None:
        node.values.creation_answered(created)
    elif not node.closed and not node.is_lost(to.id):
        data = (tuple(created.reference), tuple(created.fork))
        told = (data, f"{type(problem).__name__}: {problem}")
        node.call(to, "create_failed", told, None, 0, partial(_told_of_failure, node, created))


def _told_of_failure(node: Node, created: Transfer, pending: Pending) -> None:
    try:
        node.outcome(pending)
    except TelegradError as error:
        node.values.creation_refused(created, str(error))
    else:
        node.values.creation_answered(created)


def _nothing(pending: Pending) -> None:
    """The error of a value's making is kept with the value."""


class Proxy:
    """Turns attribute access into a call of the owner's method of that name."""

    __slots__ = ("_invoke", "_rref", "_timeout")

    def __init__(
        self,
        rref: RRef[Any],
        timeout: float | None,
        invoke: Callable[[RRef[Any], float | None, str, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        rref._check_usable("a call of one of its methods")
        self._rref = rref
        self._timeout = timeout
        self._invoke = invoke

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, timeout, invoke = self._rref, self._timeout, self._invoke

        def method(*args: Any, **kwargs: Any) -> Any:
            return invoke(rref, timeout, name, args, kwargs)

        return method


def begin_fetch(rref: RRef[Any], timeout: float | None) -> Pending:
    """Begin to fetch the value of another worker, for one who will wait for it."""
    rref._check_usable("to_here()")
    request = rref._node.values.ask_for(rref._reference, timeout)
    request.target = "to_here()"
    return request


def begin_method(
    rref: RRef[Any],
    timeout: float | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    message: Packed | None = None,
    leaving: list[Callable[[], None]] | None = None,
) -> Pending:
    """Begin a call of a method of the value, for one who will wait for it (`Node.wait`).

    The short way for telegrad's own parts: no future that others might wait for as well. `message`
    is the `invocation` if it was written before; `leaving` is for calls that are to leave together.
    """
    rref._check_usable("a call of one of its methods")
    node, reference = rref._node, rref._reference
    owner = node.members.member(reference.owner).info
    written: Packed | Parcel | None = message
    if message is None and not kwargs:
        if args:
            written = call_parcel(reference, name, args)
        else:
            written = call_without_arguments(reference, name)
    call = () if written is not None else (tuple(reference), name, args, kwargs or {})
    pending = node.call(owner, INVOKE, call, None, timeout, None, written, leaving)
    pending.target = Method(rref, name)
    return pending


def invocation(
    rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[object, ...]:
    """What `begin_method` sends."""
    return (INVOKE, (tuple(rref._reference), name, args, kwargs), {})


def remote_method(
    rref: RRef[Any],
    timeout: float | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lenders: tuple[RRef[Any], ...] = (),
) -> RRef[Any]:
    """A reference to what a method of the value will return.

    `lenders` are kept until that is there: the call names their values as loans.
    """
    call = (tuple(rref._reference), name, args, kwargs)
    keep = partial(_let_go, lenders) if lenders else None
    write = None if kwargs else partial(call_parcel, rref._reference, name, args)
    made = remote_reference(
        rref._node, rref.owner(), call_method_of, call, None, timeout, RRef, keep, write
    )
    assert made._creation is not None
    made._creation.target = Method(rref, name)
    return made


def _let_go(lenders: tuple[RRef[Any], ...], pending: Pending) -> None:
    """To be called once is to be forgotten, and the lenders with it."""


def _invoke_sync(
    rref: RRef[Any], timeout: float | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return rref._node.wait(begin_method(rref, timeout, name, args, kwargs))


def begin_method_async(
    rref: RRef[Any],
    timeout: float | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    message: Packed | None = None,
) -> CallFuture:
    """As `begin_method`, for one who may wait later, or never."""
    rref._check_usable("a call of one of its methods")
    call = (tuple(rref._reference), name, args, kwargs)
    future = begin_async(rref._node, rref.owner(), INVOKE, call, None, timeout, message)
    future._pending.target = Method(rref, name)
    return future


def _invoke_remote(
    rref: RRef[Any], timeout: float | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RRef[Any]:
    return remote_method(rref, timeout, name, args, kwargs)


@export
def call_method(
    rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """On the owner: call a method of the value behind a reference."""
    if not isinstance(rref, RRef):
        raise TypeError(f"a {type(rref).__qualname__} where a reference has to be")
    method = method_of(rref._node, rref.local_value(), name)
    return as_result(rref._node.coroutines, method, method(*args, **kwargs))


@export
def call_method_of(
    reference: tuple[int, int, int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """On the owner: as `call_method`, for a caller that keeps its own reference meanwhile.

    A reference that is only named, and not passed on, costs no message of the reference protocol.
    """
    node = current_node()
    method = method_of(node, node.values.value(read_reference(reference)), name)
    return as_result(node.coroutines, method, method(*take_all(args, node), **kwargs))


def _leave(rref: RRef[Any], passage: Passage | None) -> object:
    if passage is None:
        raise RuntimeError("Can not pickle rref outside of a call.")
    if rref._node.closed:
        raise not_initialized(f"{rref!r} belongs to a job that has been shut down")
    transfer = passage.node.values.share(rref._handle, passage.worker)
    return (tuple(transfer.reference), tuple(transfer.fork))


def _arrive(data: Any, passage: Passage | None) -> RRef[Any]:
    if passage is None:
        raise ValueError("a reference came outside of a call")
    transfer = read_transfer(data)
    node = passage.node
    if transfer.fork.created_on != passage.worker:
        raise ValueError("a reference came that says that another worker sent it")
    return RRef._of(node, transfer.reference, node.values.arrive(transfer))


def _arrive_worker(data: Any, passage: Passage | None) -> WorkerInfo:
    match data:
        case (str(name), int(worker)):
            return WorkerInfo(name, worker)
    raise ValueError("a worker is known by a name and a number")


extend("rref", RRef, _leave, _arrive, trust=Trust.DATA)
extend(
    "worker",
    WorkerInfo,
    lambda info, _: (info.name, info.id),
    _arrive_worker,
    trust=Trust.DATA,
)

__all__ = [
    "RRef",
    "State",
    "begin_fetch",
    "begin_method",
    "call_method",
    "remote_method",
    "remote_reference",
]
