"""Running a script on telegrad, together with every process that it starts."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from telegrad.compat.installation import install

VARIABLE = "TELEGRAD_COMPAT"
USAGE = "usage: telegrad compat (SCRIPT | -m MODULE) [ARGUMENT ...]"
_COMPAT = Path(__file__).resolve().parent


def run_script(arguments: Sequence[str]) -> int:
    """Run a script, or with `-m` a module, as Python would: `arguments` begin with its name.

    Its exit code is given back where it ends by `sys.exit`, as an exception of that.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    by_module = arguments[0] == "-m"
    if by_module and len(arguments) < 2:
        print(f"telegrad compat: -m needs the name of a module\n{USAGE}", file=sys.stderr)
        return 2
    if not by_module and not os.path.isfile(arguments[0]):
        print(f"telegrad compat: there is no script {arguments[0]}", file=sys.stderr)
        return 2
    _let_children_know()
    install()
    if by_module:
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _let_children_know() -> None:
    """Set the variable that the start-up file looks for, and see to it that there is one."""
    os.environ[VARIABLE] = "1"
    if find_spec("telegrad_compat_startup") is None:
        paths = [str(_COMPAT / "site"), os.environ.get("PYTHONPATH"), str(_COMPAT.parent.parent)]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
