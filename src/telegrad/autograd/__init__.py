"""Differentiate through remote calls: one backward pass over the graphs of many workers.

Importing this package adds autograd to every worker that is initialized afterwards.
"""

from telegrad.autograd.api import (
    backward,
    context,
    describe,
    get_gradients,
    require_context,
    retrieve_context,
)
from telegrad.autograd.errors import (
    AutogradError,
    BadGradient,
    ContextLost,
    PassFailed,
    PassLost,
    UnknownContext,
    UnusedResult,
)

__all__ = [
    "AutogradError",
    "BadGradient",
    "ContextLost",
    "PassFailed",
    "PassLost",
    "UnknownContext",
    "UnusedResult",
    "backward",
    "context",
    "describe",
    "get_gradients",
    "require_context",
    "retrieve_context",
]
