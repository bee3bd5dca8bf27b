"""RRefs with the words and the private methods of torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from telegrad.compat.rpc.calls import OwnersMethod, Udf, ValueUdf
from telegrad.compat.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rpc.calls import Method, Pending
from telegrad.rpc.futures import CallFuture, begin_async
from telegrad.rpc.node import Node
from telegrad.rpc.passage import Passage
from telegrad.rpc.reference_messages import ForkId, ReferenceId, Transfer
from telegrad.rpc.rref import Proxy, call_method, remote_reference
from telegrad.rpc.rref import RRef as NativeRRef
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.codec import extend

T = TypeVar("T")
Future = torch.futures.Future


def seconds(timeout: float) -> float | None:
    """Torch's way to leave a timeout unset, in telegrad's."""
    return None if timeout == UNSET_RPC_TIMEOUT else timeout


class RRef(NativeRRef[T]):
    """A reference to a value that lives on its owner."""

    def __init__(self, value: T, type_hint: object = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule):
            raise RuntimeError(
                "type_hint should only be specified when the RRef being created contains a "
                f"ScriptModule, and this is a {type(value).__name__}: leave it out."
            )
        super().__init__(value)

    @property
    def _futures(self) -> dict[str, Future[Any]]:
        futures: dict[str, Future[Any]] = self.__dict__.setdefault("futures", {})
        return futures

    def local_value(self) -> T:
        if not self.is_owner():
            raise RuntimeError(
                f"For {self._described()}, can't call localValue() on user {self._node.info!r}. "
                f"Call it on owner {self.owner()!r}."
            )
        return super().local_value()

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:  # type: ignore[override]
        return super().to_here(seconds(timeout))

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        if is_dynamo_compiling():
            return super().rpc_sync(seconds(timeout))
        return Proxy(self, seconds(timeout), _invoke_sync)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        if is_dynamo_compiling():
            return super().rpc_async(seconds(timeout))
        return Proxy(self, seconds(timeout), _invoke_async)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        return _RemoteProxy(self, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        if self.is_owner():
            _backward_on_owner(self, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RuntimeError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: without a context "
                "there is no way to the gradients on their owner."
            )
        call = (self, dist_autograd_ctx_id, retain_graph)
        node = self._node
        node.wait(node.call(self.owner(), Udf(_backward_on_owner), call, None))

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The class of the value. Asked of the owner once."""
        future = self._futures.get("type")
        if future is None:
            future = self._futures["type"] = self._ask_type(timeout)
        return future.wait() if blocking else future

    def _ask_type(self, timeout: float) -> Future[Any]:
        if self.is_owner():
            future: Future[Any] = Future()
            future.set_result(type(self.local_value()))
            return future
        return begin_async(
            self._node, self.owner(), Udf(_type_on_owner), (self,), None, seconds(timeout)
        )

    def _get_future(self) -> Future[Any]:
        """Done when the owner has answered the call that made this reference."""
        future = self._futures.get("creation")
        if future is None:
            raise RuntimeError(f"{self!r} was not made by rpc.remote: it has no future")
        return future

    def _get_profiling_future(self) -> Future[Any]:
        return self._get_future()

    def _set_profiling_future(self, future: Future[Any]) -> None:
        self._futures["creation"] = future

    # A reference is sent as itself: there is no other form to give away or to take.

    def _serialize(self) -> RRef[T]:
        self._check_can_fork()
        return self

    @classmethod
    def _deserialize(cls, rref: RRef[Any]) -> RRef[Any]:
        return rref

    def _check_can_fork(self) -> None:
        if self._node.closed:
            raise RuntimeError(f"{self!r} is deleted. Cannot call fork an UserRRef after deletion.")
        super()._check_usable("it could be sent")

    def _check_usable(self, what: str) -> None:
        if self._node.closed:
            raise RuntimeError(f"{self!r} is deleted. Cannot call {what} on it after deletion.")
        super()._check_usable(what)

    def _described(self) -> str:
        reference, fork = self._reference, self._handle
        assert isinstance(fork, ForkId)
        return (
            f"UserRRef(rref_id=GloballyUniqueId(created_on={reference.created_on}, "
            f"local_id={reference.number}), fork_id=GloballyUniqueId(created_on={fork.created_on}, "
            f"local_id={fork.number}))"
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)


PyRRef = RRef


def make_remote(
    node: Node,
    to: WorkerInfo,
    target: Callable[..., Any],
    args: tuple[Any, ...] | list[Any],
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> RRef[Any]:
    """`rpc.remote`, with a future of the creation beside the reference."""
    created: Future[Any] = Future()

    def settled(pending: Pending) -> None:
        try:
            node.outcome(pending)
        except BaseException as error:
            created.set_exception(error)
        else:
            created.set_result(None)

    rref = remote_reference(node, to, target, args, kwargs, seconds(timeout), RRef, settled)
    assert isinstance(rref, RRef)
    rref._futures["creation"] = created
    return rref


def _backward_on_owner(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    from telegrad.compat.autograd import backward

    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(
            f"RRef should contain a tensor for .backward(), but {rref!r} has a "
            f"{type(value).__name__}."
        )
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        backward(context_id, [value], retain_graph)


def _type_on_owner(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _invoke_sync(
    rref: NativeRRef[Any],
    timeout: float | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    node = rref._node
    pending = node.call(rref.owner(), _method_of(rref, name), args, kwargs, timeout)
    pending.target = Method(rref, name)
    return node.wait(pending)


def _invoke_async(
    rref: NativeRRef[Any],
    timeout: float | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CallFuture:
    method = _method_of(rref, name)
    future = begin_async(rref._node, rref.owner(), method, args, kwargs, timeout)
    future._pending.target = Method(rref, name)
    return future


def _method_of(rref: NativeRRef[Any], name: str) -> Udf:
    return Udf(OwnersMethod(rref._reference, name))


class _RemoteProxy:
    """`rref.remote().method(...)`: fails at once if the value's class has no such method."""

    def __init__(self, rref: RRef[Any], timeout: float) -> None:
        self._rref = rref
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., RRef[Any]]:
        return partial(_invoke_remote, self._rref, self._timeout, name)


def _invoke_remote(
    rref: RRef[Any], timeout: float, name: str, /, *args: Any, **kwargs: Any
) -> RRef[Any]:
    getattr(rref._get_type(timeout), name)
    call = (rref, name, args, kwargs)
    return make_remote(rref._node, rref.owner(), ValueUdf(call_method), call, None, timeout)


def _leave(rref: RRef[Any], passage: Passage | None) -> object:
    if passage is None:
        raise RuntimeError("Can not pickle rref outside of a call.")
    rref._check_can_fork()
    transfer = passage.node.values.share(rref._handle, passage.worker)
    return (tuple(transfer.reference), tuple(transfer.fork))


def _arrive(data: Any, passage: Passage | None) -> RRef[Any]:
    if passage is None:
        raise ValueError("a reference came outside of a call")
    reference, fork = data
    transfer = Transfer(ReferenceId(*reference), ForkId(*fork))
    node = passage.node
    rref = RRef._of(node, transfer.reference, node.values.arrive(transfer))
    assert isinstance(rref, RRef)
    return rref


extend("torch rref", RRef, _leave, _arrive)
