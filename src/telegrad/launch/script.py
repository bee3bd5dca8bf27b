"""Make the functions of the user's script known to workers.

A function that a script defines belongs to the module `__main__`, which in another process is
another module. As `multiprocessing` does, workers run the script once more under the name
`__mp_main__`, so that whatever stands under `if __name__ == "__main__":` does not run, and file
the result under both names. The caller files its `__main__` under both names too: what a
worker sends back is then found here.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import types
from dataclasses import dataclass
from importlib.abc import InspectLoader

NAME_IN_WORKERS = "__mp_main__"


@dataclass(frozen=True)
class MainModule:
    """How to run the user's script again: by module name (`python -m`) or by path."""

    module: str | None
    path: str | None


def find_main() -> MainModule | None:
    """The script of this process; None in a shell, a notebook, or under a package's __main__."""
    main = sys.modules["__main__"]
    sys.modules.setdefault(NAME_IN_WORKERS, main)
    name = getattr(main.__spec__, "name", None)
    if name is not None:
        # A package's __main__ is the entry of a tool (pytest, telegrad), not a user's code.
        is_tool = name == "__main__" or name.endswith(".__main__")
        return None if is_tool else MainModule(module=name, path=None)
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    if os.path.splitext(path)[1] not in ("", ".py", ".pyw"):
        return None
    if _is_console_script(path):
        return None
    return MainModule(module=None, path=os.path.abspath(path))


def install_main(main: MainModule) -> None:
    """Run the script under its name for workers and put it in the place of `__main__`."""
    global _installing
    module = types.ModuleType(NAME_IN_WORKERS)
    code = _code_of(main, module)
    # Classes look their module up while they are being defined, so it is filed before it runs.
    sys.modules["__main__"] = sys.modules[NAME_IN_WORKERS] = module
    _installing = True
    try:
        exec(code, module.__dict__)
    finally:
        _installing = False


def install_empty_main() -> None:
    """Where there is no script, what a worker looks up in `__main__` is the user's and not known
    there: it must not be found in what started this process."""
    sys.modules["__main__"] = types.ModuleType("__main__")


def is_installing() -> bool:
    """Whether this process runs the script only in order to know its functions."""
    return _installing


_installing = False


def _code_of(main: MainModule, module: types.ModuleType) -> types.CodeType:
    if main.module is not None:
        spec = importlib.util.find_spec(main.module)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            raise ImportError(f"the main module {main.module!r} cannot be found by a worker")
        module.__file__ = spec.origin
        module.__package__ = spec.parent
        code = spec.loader.get_code(main.module)
        if code is None:
            raise ImportError(f"the main module {main.module!r} is not written in Python")
        return code
    assert main.path is not None
    module.__file__ = main.path
    with io.open_code(main.path) as file:
        # The script has its own future statements, not those of this file.
        return compile(file.read(), main.path, "exec", dont_inherit=True)


def _is_console_script(path: str) -> bool:
    """Whether an installer made this file: it holds nothing but a call into a package."""
    return os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable)
