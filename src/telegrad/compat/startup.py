"""Installing at the start of a process, before any user code.

A file `telegrad_compat.pth` lies beside the package, and Python runs its one line whenever it
starts: in scripts, in children that are spawned, in servers that fork. If TELEGRAD_COMPAT is set it
calls `arm`. That must be cheap and import nothing large, as every Python process of this environment
runs it: it waits for `import torch` and installs at the end of that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

VARIABLE = "TELEGRAD_COMPAT"
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


def wanted() -> bool:
    """Whether the environment asks for the installation."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def arm() -> None:
    """Install as soon as torch has been imported."""
    if not wanted() or any(isinstance(finder, _AwaitTorch) for finder in sys.meta_path):
        return
    if "torch" in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _AwaitTorch())


def _install() -> None:
    from telegrad.compat.installation import install

    install()


class _AwaitTorch(importlib.abc.MetaPathFinder):
    """Finds nothing but `torch`, once, and that as it would have been found anyway."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenInstall(spec.loader)
        return spec


class _ThenInstall(importlib.abc.Loader):
    """Loads as another loader does, then installs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _install()


def run_script(arguments: Sequence[str]) -> int:
    """Run a script with its arguments on telegrad, together with every process that it starts.

    This is `python -m telegrad compat SCRIPT [ARGUMENT ...]`; with `-m MODULE` it runs a module.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: telegrad compat (SCRIPT | -m MODULE) [ARGUMENT ...]")
        return 0 if arguments else 2
    _let_children_know()
    _install()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            print("telegrad compat: -m needs the name of a module", file=sys.stderr)
            return 2
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"telegrad compat: there is no script {script}", file=sys.stderr)
        return 2
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    return 0


def _let_children_know() -> None:
    """Set the variable; where the package was not installed with its .pth, a path as well."""
    os.environ[VARIABLE] = "1"
    if _pth_is_active():
        return
    paths = [_SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _pth_is_active() -> bool:
    return any(os.path.exists(os.path.join(path, "telegrad_compat.pth")) for path in sys.path)
