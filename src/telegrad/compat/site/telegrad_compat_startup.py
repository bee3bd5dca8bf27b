"""Installs telegrad's compatibility layer at the start of a process, before any user code.

`telegrad_compat.pth` lies beside this file in site-packages, and Python runs its one line whenever
it starts: in scripts, in children that are spawned, in servers that fork. If TELEGRAD_COMPAT is set
it calls `arm`. That must be cheap and import nothing large, for most Python processes never need
torch: so `arm` waits for `import torch` and installs at the end of that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def arm() -> None:
    """Install now if torch is there, else as soon as it has been imported."""
    if "torch" in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _AwaitTorch())


def _install() -> None:
    from telegrad.compat import install

    install()


class _AwaitTorch(importlib.abc.MetaPathFinder):
    """Finds `torch`, once, as it would have been found anyway, and adds a step to its loading."""

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
