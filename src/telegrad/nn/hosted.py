"""The module itself, on the worker where it lives, and what its remote faces ask of it.

Faces of one module may call it at the same time, as threads of one process may call one module.
Nothing here adds a lock to what torch does, but for the first calls of a compiled module.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from telegrad.nn.ambient import Ambient, Autocast, under
from telegrad.nn.compilation import Compilation
from telegrad.nn.lazy import resolve, with_each
from telegrad.rpc import RRef

Conversions = Mapping[torch.dtype, tuple[torch.dtype, torch.device | None]]


Chain = tuple[tuple[int, ...], ...]
"""The remote modules that lead to one inside of them, by their references."""


class HostedModule:
    """A module and the device to which its inputs are brought."""

    def __init__(
        self, module: nn.Module, device: str | None = None, *, compiled: bool = False
    ) -> None:
        self.module = module
        self.device = None if device is None else torch.device(device)
        self._compilation = Compilation() if compiled else None

    def forward(self, around: Ambient | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.compute(around, self.prepared(args), self.prepared(kwargs))

    def forward_plainly(self, *args: Any) -> Any:
        """As `forward`, for what nearly all calls are: no keywords, nothing around."""
        if self.device is not None:
            args = self._on_device(args)
        if self._compilation is None:
            return self.module(*args)
        return self.compute(None, args, {})

    def forward_under(
        self,
        grad: bool,
        autocast: torch.dtype | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As `forward`, for callers that were compiled."""
        regions = () if autocast is None else (Autocast("cpu", autocast, True),)
        return self.forward(Ambient(grad, regions), args, kwargs)

    def prepared(self, value: Any) -> Any:
        """Arguments as the module takes them: fetched, and on its device."""
        return self._on_device(resolve(value))

    def compute(self, around: Ambient | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with under(around):
            if self._compilation is None:
                return self.module(*args, **kwargs)
            with self._compilation.admit(args, kwargs):
                return self.module(*args, **kwargs)

    def _changed(self) -> None:
        if self._compilation is not None:
            self._compilation.forget()

    def _on_device(self, value: Any) -> Any:
        if self.device is None:
            return value
        return brought_to(self.device, value)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._changed()
        return function(self.module, *args, **kwargs)

    def named_parameters(
        self, recurse: bool, within: Chain = ()
    ) -> list[tuple[str, RRef[nn.Parameter]]]:
        """Those that live here and those of remote modules inside, in the order of torch's own."""
        return self._named("named_parameters", recurse, within)

    def named_buffers(
        self, recurse: bool, within: Chain = ()
    ) -> list[tuple[str, RRef[torch.Tensor]]]:
        return self._named("named_buffers", recurse, within)

    def _named(self, which: str, recurse: bool, within: Chain) -> list[tuple[str, RRef[Any]]]:
        found: list[tuple[str, RRef[Any]]] = []
        seen: set[torch.Tensor] = set()
        for path, module in self.module.named_modules() if recurse else [("", self.module)]:
            if _is_remote(module):
                inside = getattr(_asked(module, within), which)(recurse, _extended(within, module))
                found += [(_joined(path, name), rref) for name, rref in inside]
                continue
            for name, tensor in getattr(module, which)(prefix=path, recurse=False):
                if tensor not in seen:
                    seen.add(tensor)
                    found.append((name, RRef(tensor)))
        return found

    def hosted_inside(self, within: Chain = ()) -> list[tuple[str, RRef[HostedModule]]]:
        """The remote modules inside of this one, and those inside of them, by their paths."""
        found = []
        for path, remote in self._remote_modules():
            inside = _asked(remote, within).hosted_inside(_extended(within, remote))
            found += [(path, remote.rref), *((_joined(path, name), rref) for name, rref in inside)]
        return found

    def _remote_modules(self) -> list[tuple[str, Any]]:
        modules = self.module.named_modules()
        return [(path, module) for path, module in modules if _is_remote(module)]

    def copied(self) -> RRef[HostedModule]:
        """A reference to a copy that shares nothing with this module."""
        return RRef(copy.deepcopy(self))

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state, and the versions of the modules in it, by which old states are recognized."""
        state = self.module.state_dict()
        return dict(state), dict(getattr(state, "_metadata", {}))

    def load_state_dict(
        self, given: dict[str, Any], versions: dict[str, Any] | None, assign: bool
    ) -> tuple[list[str], list[str]]:
        self._changed()
        state: Any = OrderedDict(given)
        if versions is not None:
            state._metadata = versions
        found = self.module.load_state_dict(state, strict=False, assign=assign)
        return list(found.missing_keys), list(found.unexpected_keys)

    def train(self, mode: bool) -> None:
        self._changed()
        self.module.train(mode)

    def to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As `nn.Module.to`; if it names a device, inputs go there from now on."""
        self._changed()
        self.module.to(*args, **kwargs)
        if _names_device(args, kwargs):
            self._follow_device()

    def _follow_device(self) -> None:
        """The module was moved: inputs are to be brought to where it is."""
        self.device = next((tensor.device for tensor in self._tensors()), self.device)

    def _tensors(self) -> Iterator[torch.Tensor]:
        return chain(self.module.parameters(), self.module.buffers())

    def dtypes(self, within: Chain = ()) -> list[torch.dtype]:
        """The dtypes of all parameters and buffers, those of remote modules inside as well."""
        found = dict.fromkeys(tensor.dtype for tensor in self._tensors())
        for _, remote in self._remote_modules():
            found |= dict.fromkeys(_asked(remote, within).dtypes(_extended(within, remote)))
        return list(found)

    def convert(self, conversions: Conversions) -> None:
        """Bring each tensor to the dtype, and the device if one is given, of its own dtype."""
        self._changed()

        def converted(tensor: torch.Tensor) -> torch.Tensor:
            dtype, device = conversions[tensor.dtype]
            return tensor.to(device or tensor.device, dtype)

        self.module._apply(converted)  # type: ignore[no-untyped-call]
        if any(device is not None for _, device in conversions.values()):
            self._follow_device()

    def zero_grad(self, set_to_none: bool, within: Chain = ()) -> None:
        if not _is_remote(self.module):
            self.module.zero_grad(set_to_none)
        for _, remote in self._remote_modules():
            _asked(remote, within).zero_grad(set_to_none, _extended(within, remote))

    def requires_grad_(self, requires_grad: bool, within: Chain = ()) -> None:
        self._changed()
        if not _is_remote(self.module):
            self.module.requires_grad_(requires_grad)
        for _, remote in self._remote_modules():
            _asked(remote, within).requires_grad_(requires_grad, _extended(within, remote))

    def apply(self, function: Callable[[nn.Module], None]) -> None:
        self._changed()
        self.module.apply(function)


def _is_remote(module: nn.Module) -> bool:
    from telegrad.nn.remote_module import RemoteModule

    return isinstance(module, RemoteModule)


def _asked(remote: Any, within: Chain) -> Any:
    """What a remote module inside of this one has to say; `within` leads from the first here."""
    if tuple(remote.rref._reference) in within:
        raise ValueError(
            f"{remote!r} is inside of itself: remote modules that hold each other have no end."
        )
    return remote.rref.rpc_sync(remote.timeout)


def _extended(within: Chain, remote: Any) -> Chain:
    return (*within, tuple(remote.rref._reference))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def brought_to(device: torch.device, value: Any) -> Any:
    """The value with its tensors (in containers, too) on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple | dict):
        return with_each(value, lambda item: brought_to(device, item))
    return value


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "device" in kwargs or "tensor" in kwargs:
        return True
    return any(isinstance(arg, str | int | torch.device | torch.Tensor) for arg in args)


def host(
    module_class: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str | None,
    compile: bool | dict[str, Any],
) -> RRef[HostedModule]:
    """On the worker: make the module, and a reference to it."""
    module = module_class(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{module_class!r} made a {type(module).__name__}: RemoteModule needs a class of "
            "nn.Module, or a function that returns a module."
        )
    if device is not None:
        module.to(device)
    if compile:
        module.compile(**(compile if isinstance(compile, dict) else {}))
    return RRef(HostedModule(module, device, compiled=bool(compile)))
