"""Differentiable RPC for PyTorch."""

from telegrad import autograd, rpc
from telegrad.launch.local import run
from telegrad.version import __version__
from telegrad.wire.codec import export

__all__ = ["__version__", "autograd", "export", "rpc", "run"]
