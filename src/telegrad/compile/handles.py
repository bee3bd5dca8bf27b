"""References and futures as Dynamo sees them.

A `MadeRRef` is what `remote` gives inside of a compiled function: a reference whose identity is the
value of a tensor, its *token*, so that one graph serves every reference that passes through it. The
token also carries the autograd edge: what is done with the reference comes before the call that
made it, in the backward pass. It can be returned, kept, and given to another compiled function;
its methods work outside of compiled functions, too.

What must never happen: a handle compared by `is`, or used as a key, without a guard. Both handles
have `__eq__` and `__hash__` over attributes that Dynamo guards.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from telegrad.rpc.current import current_node
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.worker import WorkerInfo

Number = TypeVar("Number", int, float)


class MadeRRef:
    """A reference to the result of a call that a compiled function made."""

    def __init__(self, worker: str, token: Tensor, value: tuple[Tensor, ...]) -> None:
        self.worker = worker
        self.token = token
        self.value = value
        """A tensor without memory of its own that has the shape of the value, if that is one."""

    def owner(self) -> WorkerInfo:
        from telegrad.compile import traced

        return traced.worker_info(self.worker)

    def owner_name(self) -> str:
        return self.worker

    def is_owner(self) -> bool:
        return self.worker == current_node().info.name

    def shape_of_value(self) -> Tensor:
        if len(self.value) != 1:
            raise TelegradError(
                "A reference to something else than one tensor, made in a compiled function, "
                "cannot be used there. Make it outside of the compiled function."
            )
        return self.value[0].detach()

    def to_here(self, timeout: float | None = None) -> Any:
        """The value on this worker."""
        return to_here(self, timeout)

    def rpc_sync(self, timeout: float | None = None) -> MethodsOf:
        return MethodsOf(self, timeout, 0)

    def rpc_async(self, timeout: float | None = None) -> MethodsOf:
        return MethodsOf(self, timeout, 1)

    def remote(self, timeout: float | None = None) -> MethodsOf:
        return MethodsOf(self, timeout, 2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MadeRRef) and self.token is other.token

    def __hash__(self) -> int:
        return hash(self.worker)


class MethodsOf:
    """Turns attribute access into a call of that method of the value, on its owner."""

    def __init__(self, rref: Any, timeout: float | None, kind: int) -> None:
        self._rref = rref
        self._timeout = timeout
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        rref, timeout, kind = self._rref, self._timeout, self._kind

        def method(*args: Any, **kwargs: Any) -> Any:
            from telegrad.compile import traced

            call = (traced.rpc_sync, traced.rpc_async, traced.remote)[kind]
            return call(home_of(rref), call_method, (rref, name, args, kwargs), None, timeout)

        return method


class AllOf:
    """What `torch.futures.collect_all` gives inside of a compiled function."""

    def __init__(self, futures: list[Any]) -> None:
        self.futures = futures

    def wait(self) -> list[Any]:
        for future in self.futures:
            future.wait()
        return self.futures


def wait_all(futures: list[Any]) -> list[Any]:
    """Stands for that of `torch.futures`."""
    return [future.wait() for future in futures]


def collect_all(futures: list[Any]) -> AllOf:
    """Stands for that of `torch.futures`."""
    return AllOf(futures)


def home_of(rref: Any) -> str | int:
    """The worker that owns a reference of either kind. Inlined by Dynamo."""
    if isinstance(rref, MadeRRef):
        return rref.worker
    owner: int = rref._reference.owner
    return constant(owner)


def constant(number: Number) -> Number:
    """A number that Dynamo must guard, not turn into a symbol: an element of a set is hashed."""
    return next(iter({number}))


def to_here(rref: Any, timeout: float | None = None) -> Any:
    from telegrad.compile import traced

    return traced.rpc_sync(home_of(rref), value_of, (rref,), None, timeout)


def value_of(rref: Any) -> Any:
    return rref.to_here()


def call_method(rref: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.to_here(), name)(*args, **kwargs)
