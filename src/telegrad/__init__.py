"""Differentiable RPC for PyTorch."""

from __future__ import annotations

import importlib
from types import ModuleType

from telegrad import autograd, rpc
from telegrad.launch.local import run
from telegrad.version import __version__
from telegrad.wire.codec import export

# What a script may not need is imported when it is first named: torch's own counterparts are slow.
_ROOMS = ("checkpoint", "compat", "compile", "mesh", "nn", "optim", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"telegrad.{name}")
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


__all__ = ["__version__", "autograd", "export", "rpc", "run"]
