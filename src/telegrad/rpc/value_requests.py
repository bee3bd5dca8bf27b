"""What others ask of the values here: to make one, to give it to them, to call its methods."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from types import CoroutineType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from telegrad.rpc.errors import Refused, TelegradError
from telegrad.rpc.functions import ASYNC_EXECUTION
from telegrad.rpc.loans import Loan, take_all
from telegrad.rpc.methods import (
    CREATE_BY_METHOD,
    FETCH,
    METHOD,
    read_call,
    read_creation,
    read_fetch,
)
from telegrad.rpc.reference_messages import (
    ReferenceId,
    Transfer,
    read_reference,
    read_transfer,
)
from telegrad.rpc.results import Finish, Later, as_result
from telegrad.rpc.values import ABSENT
from telegrad.wire.names import is_exported

if TYPE_CHECKING:
    from telegrad.rpc.node import Node


class ValueRequests:
    """The operations of a node that have to do with its values."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._values = node.values
        self._me = node.info.id
        node.on_operation("create", self._create)
        node.on_operation("create_failed", self._create_failed)
        node.on_operation("fill", self._fill)
        node.on_operation("invoke", self._invoke)
        node.on_operation(FETCH, self._fetch)
        node.on_operation(METHOD, self._call)
        node.on_operation(CREATE_BY_METHOD, self._create_by_method)

    # Making.

    def _create(self, sender: int, transfer: Any, target: Any, args: Any, kwargs: Any) -> object:
        created = self._requested(sender, read_transfer(transfer))
        return self._make(created, partial(self._run, target, args, kwargs))

    def _create_by_method(self, sender: int, parcel: Any) -> object:
        transfer, call = read_creation(parcel)
        created = self._requested(sender, transfer)
        return self._make(created, partial(self.invoke, sender, *call, {}))

    def _requested(self, sender: int, created: Transfer) -> ReferenceId:
        reference, fork = created
        if reference.owner != self._me or not (reference.created_on == fork.created_on == sender):
            raise ValueError("a worker names values that others make by names of its own only")
        self._values.take_request(created)
        return reference

    def _create_failed(self, sender: int, transfer: Any, reason: str) -> None:
        created = self._requested(sender, read_transfer(transfer))
        self._values.settle(created, None, TelegradError(reason))

    def _fill(self, sender: int, reference: Any, target: Any, args: Any, kwargs: Any) -> object:
        if sender != self._me:
            raise ValueError("a worker fills its own references only")
        return self._make(read_reference(reference), partial(self._run, target, args, kwargs))

    def _run(self, target: Any, args: Any, kwargs: Any) -> object:
        if self._node.data_only:
            self._node.require_exported(target)
        if self._values.journey.unconfirmed:
            self._values.await_confirmed()
        self._node.transport.starting(target)
        return as_result(self._node.coroutines, target, target(*args, **kwargs))

    def _make(self, reference: ReferenceId, run: Callable[[], object]) -> object:
        """Do what makes the value. Its error is for those who ask for the value."""
        try:
            result = run()
        except BaseException as error:
            self._values.settle(reference, None, error)
            return None
        if type(result) is not Later:
            self._values.settle(reference, result, None)
            return None
        subscribe = result.subscribe

        def settled(finish: Finish) -> None:
            def done(value: object, error: BaseException | None) -> None:
                self._values.settle(reference, value, error)
                finish(None, None)

            subscribe(done)

        return Later(settled)

    # Giving, and calling.

    def _fetch(self, sender: int, parcel: Any) -> object:
        named = read_fetch(parcel)
        value = self._values.stored(named, ABSENT)
        if value is not ABSENT:
            return value
        self._require_own(named)
        is_there, value, error = self._values.find(named)
        if not is_there:
            return Later(lambda finish: self._values.when_ready(named, finish, sender))
        if error is not None:
            raise error
        return value

    def _invoke(self, sender: int, reference: Any, name: str, args: Any, kwargs: Any) -> object:
        return self.invoke(sender, read_reference(reference), name, args, kwargs)

    def _call(self, sender: int, parcel: Any) -> object:
        return self.invoke(sender, *read_call(parcel), {})

    def invoke(
        self, sender: int, named: ReferenceId, name: str, args: Any, kwargs: dict[str, Any]
    ) -> object:
        """Call a method of a value here, for the sake of that worker."""
        value = self._values.stored(named, ABSENT)
        if value is ABSENT:
            return self._invoke_absent(sender, named, name, args, kwargs)
        if Loan in {*map(type, args)}:
            args = take_all(args, self._node)
        return self._call_method(value, name, args, kwargs)

    def _invoke_absent(
        self, sender: int, named: ReferenceId, name: str, args: Any, kwargs: dict[str, Any]
    ) -> object:
        """As `invoke`, for a value that is not there now."""
        self._require_own(named)
        args = take_all(args, self._node)
        is_there, value, error = self._values.find(named)
        if not is_there:
            return self._invoke_when_ready(sender, named, name, args, kwargs)
        if error is not None:
            raise error
        return self._call_method(value, name, args, kwargs)

    def _require_own(self, named: ReferenceId) -> None:
        """What others own is not waited for here."""
        if named.owner != self._me:
            raise ValueError(f"{named} is no value of worker {self._node.info.name!r}")

    def _call_method(self, value: object, name: str, args: Any, kwargs: Any) -> object:
        node = self._node
        if self._values.journey.unconfirmed:
            self._values.await_confirmed()
        method = method_of(node, value, name) if node.data_only else getattr(value, name)
        node.transport.starting(getattr(method, "__func__", method))
        result = method(*args, **kwargs)
        # As `as_result` would see by itself.
        if type(result) is CoroutineType or getattr(method, ASYNC_EXECUTION, False) is True:
            return as_result(node.coroutines, method, result)
        return result

    def _invoke_when_ready(
        self, sender: int, named: ReferenceId, name: str, args: Any, kwargs: Any
    ) -> Later:
        """No thread waits for a value that may never come."""
        node, crossing = self._node, self._node.crossing
        scope = crossing.current()
        if self._values.journey.unconfirmed:
            self._values.await_confirmed()

        def invoke(value: object, finish: Finish) -> None:
            try:
                within = contextlib.nullcontext() if scope is None else crossing.enter(node, scope)
                with within:
                    result = self._call_method(value, name, args, kwargs)
            except BaseException as error:
                finish(None, error)
            else:
                if type(result) is Later:
                    result.subscribe(finish)
                else:
                    finish(result, None)

        def subscribe(finish: Finish) -> None:
            def ready(value: object, error: BaseException | None) -> None:
                if error is not None:
                    finish(None, error)
                else:
                    node.runtime.spawn(partial(invoke, value, finish))

            self._values.when_ready(named, ready, sender)

        return Later(subscribe)


def method_of(node: Node, value: object, name: str) -> Any:
    """A method that another worker calls by its name."""
    if not node.data_only:
        return getattr(value, name)
    # The class decides alone: what an instance holds may have come from anywhere.
    function = inspect.getattr_static(type(value), name, None) if type(name) is str else None
    if not isinstance(function, FunctionType) or not is_exported(function):
        kind = type(value).__qualname__
        raise Refused(
            f"worker {node.info.name!r} takes data only and does not run that method "
            f"of a {kind}: mark the method with @telegrad.export"
        )
    return MethodType(function, value)
