"""Differentiable RPC for PyTorch."""

from telegrad import autograd, rpc
from telegrad.launch.local import run
from telegrad.wire.codec import export

__version__ = "0.1.0"

__all__ = ["autograd", "export", "rpc", "run"]
