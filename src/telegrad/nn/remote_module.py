"""A module that lives on another worker and is used as if it were here.

`RemoteModule` is a real `nn.Module`, so it can be a child of local modules. What torch does to a
tree of modules by calling its children, it does to the remote one as well: `train`, `eval`,
`state_dict`, `load_state_dict`, `apply` and `to` of a parent reach it. What torch does by
collecting tensors does not: `parameters()`, `requires_grad_` and `zero_grad` of a *parent* know
only local parameters. Those of the remote module itself reach its worker, where `parameters()`
gives references. `DistributedOptimizer` takes the parent and finds both kinds.

Calls are recorded in the caller's autograd context; outside of one they run without grad, because
no backward pass could come back through them.

Hooks that are registered on the RemoteModule run at the caller, with the tensors that left and
arrived. `remote.run(register, ...)` registers hooks where the module lives.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from telegrad.nn.ambient import ambient
from telegrad.nn.hosted import HostedModule, host
from telegrad.nn.lazy import PLAIN, Lazy, lazily, lent
from telegrad.rpc import CallFuture, RRef, TelegradError, WorkerInfo, rpc_sync
from telegrad.rpc.outside import refuse_in_graph
from telegrad.rpc.rref import begin_method
from telegrad.wire.codec import extend

T = TypeVar("T")

_numbers = itertools.count()
_VERSIONS = "versions on the worker"
_SHARED = {*vars(nn.Module()), "rref", "remote_device", "timeout", "_number", "_needs_gradients"}
"""What each face of a module has by itself; the rest of its attributes are those of a subclass."""
_left_out: ContextVar[bool] = ContextVar("remote modules are left out", default=False)


@contextmanager
def leaving_out_remote_modules() -> Iterator[None]:
    """In this block the state of a module is that of its local parts."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def _modes() -> tuple[bool, torch.dtype | None]:
    """What `ambient` says, in what Dynamo can trace; whether there is a context, it cannot know."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.is_grad_enabled(), autocast


class RemoteModule(nn.Module):
    """Make a module on a worker and call it from here.

        encoder = RemoteModule("worker1", nn.Linear, (8, 4))
        decoder = RemoteModule("worker2/cuda:0", Decoder, kwargs={"depth": 2}, compile=True)
        y = decoder(encoder.lazy(x))     # the code goes from worker1 to worker2, never through here

    `remote_device` is a worker, or a worker and a device on it: inputs are then brought to that
    device. With `compile` the worker compiles the module, with the options of `torch.compile` if
    a dict has them. `timeout` bounds each call to the worker in seconds; 0 for none, by default
    the job's.
    """

    def __init__(
        self,
        remote_device: str,
        module_class: Callable[..., nn.Module],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        compile: bool | dict[str, Any] = False,
        timeout: float | None = None,
    ) -> None:
        refuse_in_graph("RemoteModule")
        super().__init__()
        _check_arguments(remote_device, module_class, args, kwargs, compile)
        worker, _, device = remote_device.partition("/")
        making = (module_class, tuple(args), dict(kwargs or {}), device or None, compile)
        self._take(rpc_sync(worker, host, making, timeout=timeout), remote_device, timeout)

    def _take(self, rref: RRef[HostedModule], remote_device: str, timeout: float | None) -> None:
        self._number = next(_numbers)
        self._needs_gradients: bool | None = None
        self.rref = rref
        self.remote_device = remote_device
        self.timeout = timeout

    @property
    def owner(self) -> WorkerInfo:
        """The worker on which the module lives."""
        return self.rref.owner()

    # Calling.

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its worker and wait. `Lazy` arguments are fetched by that worker."""
        if is_dynamo_compiling():
            self._guard_gradients()
            return self.rref.rpc_sync(self.timeout).forward_under(*_modes(), args, kwargs)
        lenders: list[RRef[Any]] = []  # kept while this waits
        method, request = _request(args, kwargs)
        pending = begin_method(self.rref, self.timeout, method, lent(request, lenders))
        return self.rref._node.wait(pending)

    def forward_async(self, /, *args: Any, **kwargs: Any) -> CallFuture:
        """As a call, but gives a future at once. Hooks of this object do not run."""
        future: CallFuture
        if is_dynamo_compiling():
            self._guard_gradients()
            future = self.rref.rpc_async(self.timeout).forward_under(*_modes(), args, kwargs)
        else:
            future = self.rref.rpc_async(self.timeout).forward(ambient(), args, kwargs)
        return future

    def _guard_gradients(self) -> None:
        """Have Dynamo guard whether the parameters were frozen or thawed: it decides whether the
        result of a call needs a gradient. One graph for each serves whoever does so by turns."""
        if self._needs_gradients:
            return

    def lazy(self, /, *args: Any, **kwargs: Any) -> Lazy[Any]:
        """As a call, but the result stays on the worker. Hooks of this object do not run."""
        refuse_in_graph("Lazy results")
        return lazily(self.rref, self.timeout, *_request(args, kwargs))

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(module, *args, **kwargs)` on the worker, with the module itself.

        For whatever has no method here: hooks that run where the module lives, pruning, a look at
        a buffer.
        """
        return self.rref.rpc_sync(self.timeout).run(function, args, kwargs)

    @property
    def _ask(self) -> Any:
        refuse_in_graph("State and parameters of a RemoteModule")
        return self.rref.rpc_sync(self.timeout)

    # Parameters and state.

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[nn.Parameter]]]:
        """Names and references to the parameters, which stay on their worker."""
        yield from _under(prefix, self._ask.named_parameters(recurse))

    def parameters(  # type: ignore[override]
        self, recurse: bool = True
    ) -> Iterator[RRef[nn.Parameter]]:
        for _, rref in self.named_parameters(recurse=recurse):
            yield rref

    def named_buffers(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.Tensor]]]:
        """Names and references to the buffers, which stay on their worker."""
        yield from _under(prefix, self._ask.named_buffers(recurse))

    def buffers(self, recurse: bool = True) -> Iterator[RRef[torch.Tensor]]:  # type: ignore[override]
        for _, rref in self.named_buffers(recurse=recurse):
            yield rref

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Copies of the module's state, under the names that it would have here."""
        refuse_in_graph("State and parameters of a RemoteModule")
        found = _empty_state() if destination is None else destination
        if _left_out.get():
            return found
        state, versions = self._ask.state_dict()
        for name, value in state.items():
            found[prefix + name] = value
        noted = getattr(found, "_metadata", None)
        if noted is not None:
            noted.update({f"{prefix}{path}".removesuffix("."): v for path, v in versions.items()})
            noted[prefix[:-1]] = {**versions.get("", {}), _VERSIONS: versions}
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        refuse_in_graph("State and parameters of a RemoteModule")
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if _left_out.get():
            return
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        part = {n.removeprefix(prefix): v for n, v in state_dict.items() if n.startswith(prefix)}
        # Of a child torch tells the metadata of its root only; here all of it is noted there.
        versions = getattr(state_dict, "_metadata", None) or local_metadata.get(_VERSIONS)
        try:
            missing, unexpected = self._ask.load_state_dict(part, versions, assign)
        except TelegradError:
            raise  # The worker did not take the state: it is gone, or does not answer.
        except RuntimeError as error:
            error_msgs.append(f"on worker {self.owner.name!r}: {error}")
            return
        missing_keys.extend(prefix + name for name in missing)
        unexpected_keys.extend(prefix + name for name in unexpected)

    # What parents do to their children.

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self._ask.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert or move the module on its worker; a device is one of that worker."""
        self._ask.to(args, kwargs)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `double` or `half` of a parent come to: a function that cannot travel.

        It is tried on an empty tensor of each dtype that the module has, and what it made of those
        is done on the worker.
        """
        tried = {dtype: fn(torch.empty(0, dtype=dtype)) for dtype in self._ask.dtypes()}
        conversions = {
            dtype: (made.dtype, None if made.is_cpu else made.device)
            for dtype, made in tried.items()
        }
        self._ask.convert(conversions)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function, which must have a name to travel by, to all modules on the worker."""
        self._ask.apply(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._ask.requires_grad_(requires_grad)
        self._needs_gradients = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` on the worker. Gradients of autograd contexts are not kept there."""
        self._ask.zero_grad(set_to_none)

    # As an object.

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteModule:
        """A copy on the same worker, with parameters of its own."""
        rref = self._ask.copied()
        made = _face(rref, self.remote_device, self.timeout, self.training, type(self))
        memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in ("rref", "_number"):
                vars(made)[name] = copy.deepcopy(value, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not RemoteModule:  # Inside of calls only: elsewhere its RRef refuses.
            own = {name: value for name, value in vars(self).items() if name not in _SHARED}
            face = (self.rref, self.remote_device, self.timeout, self.training, type(self))
            return _face, face, own
        raise TypeError(
            f"{self!r} cannot be pickled, for it would be of no use outside of its job: send it as "
            "an argument of a call, or save its state_dict()."
        )

    def extra_repr(self) -> str:
        return f"on {self.remote_device}"

    # Equal if it is the same object, as with any module. But a number can be guarded: where Dynamo
    # compares objects, it remembers the outcome and not what it was about.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteModule) and self._number == other._number

    def __hash__(self) -> int:
        return hash(self._number)


def _request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The method of the hosted module that runs it, and what that is given."""
    around = ambient()
    if around is None and not kwargs and {*map(type, args)} <= PLAIN:
        return "forward_plainly", args
    return "forward", (around, args, kwargs)


def _check_arguments(
    remote_device: object, module_class: object, args: object, kwargs: object, compile: object
) -> None:
    if not isinstance(remote_device, str):
        raise TypeError(
            f"{remote_device!r} names no worker: give its name, or 'worker/device', as a string."
        )
    if isinstance(module_class, nn.Module):
        raise TypeError(
            f"RemoteModule makes a module on its worker, so it needs the class "
            f"{type(module_class).__name__} and its arguments, not a module that is here."
        )
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping | None):
        raise TypeError(
            f"The arguments of {getattr(module_class, '__name__', module_class)} are a tuple and a "
            f"dict: RemoteModule({remote_device!r}, ..., (8, 4), {{'bias': False}})."
        )
    if not isinstance(compile, bool | dict):
        raise TypeError(
            f"compile={compile!r}: give True, False or a dict of options of torch.compile."
        )


def _under(prefix: str, found: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """What has names inside of a module, by its names from outside."""
    lead = f"{prefix}." if prefix else ""
    for name, each in found:
        yield lead + name, each


def _empty_state() -> Any:
    """As torch begins one: with room for the versions of the modules."""
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    return state


def _leave(module: RemoteModule, _: object) -> tuple[object, ...]:
    return (module.rref, module.remote_device, module.timeout, module.training)


def _arrive(data: Any, _: object) -> RemoteModule:
    return _face(*data)


def _face(
    rref: RRef[HostedModule],
    remote_device: str,
    timeout: float | None,
    training: bool,
    face_class: type[RemoteModule] = RemoteModule,
) -> RemoteModule:
    """Another object for a module that exists already."""
    module = face_class.__new__(face_class)
    nn.Module.__init__(module)
    module._take(rref, remote_device, timeout)
    module.training = training
    return module


extend("remote module", RemoteModule, _leave, _arrive)
