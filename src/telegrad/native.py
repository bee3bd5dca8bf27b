"""The compiled modules, where they were built for the torch that runs.

What they do is done in Python beside each of them as well, for machines without a compiler.
`TELEGRAD_COMPILED=0` in the environment chooses that, so that the one can be compared with the
other.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

MODULES = ("telegrad.wire._native", "telegrad.autograd._graph")


def compiled(name: str) -> Any:
    """The compiled module of that name; None where there is none to be used."""
    if os.environ.get("TELEGRAD_COMPILED") == "0":
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def why_not(name: str) -> str:
    """Why `compiled` gives None."""
    if os.environ.get("TELEGRAD_COMPILED") == "0":
        return "TELEGRAD_COMPILED=0 is set"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return "it was installed without a C++ compiler, or without torch beside it"
    except ImportError as error:
        return str(error)
    return ""
