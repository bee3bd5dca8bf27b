"""Arms telegrad's compatibility layer where its .pth file is not installed (a source checkout).

This directory is put first on PYTHONPATH by `telegrad compat`; a sitecustomize that it hides is run
all the same.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    source = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
    if source not in sys.path:
        sys.path.append(source)
    spec = importlib.util.spec_from_file_location(
        "_telegrad_compat_startup", os.path.join(os.path.dirname(_HERE), "startup.py")
    )
    assert spec is not None
    assert spec.loader is not None
    startup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    startup.arm()


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_arm()
_run_hidden()
