"""Does what telegrad_compat.pth does, where that is not installed: in a source checkout.

`telegrad compat` puts this directory first on PYTHONPATH for the processes that a script starts. A
sitecustomize that this one hides is run all the same.
"""

import importlib.machinery
import importlib.util
import os
import sys

import telegrad_compat_startup  # type: ignore[import-not-found,import-untyped,unused-ignore]

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("TELEGRAD_COMPAT", "0") not in ("", "0"):
    telegrad_compat_startup.arm()
_run_hidden()
