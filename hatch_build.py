"""Compiles `wire/_native.c` when telegrad is built or installed.

Without a compiler telegrad is built all the same, and takes longer for small messages.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/telegrad/wire/_native.c")
OPTIONS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fPIC", "-shared")


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        target = SOURCE.with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
        problem = self._compile(Path(self.root) / SOURCE, Path(self.root) / target)
        if problem is not None:
            self.app.display_warning(f"{SOURCE} was not compiled: {problem}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(target))

    def _compile(self, source: Path, target: Path) -> str | None:
        """What went wrong, if anything did; then no library of an earlier build is left either."""
        compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
        options = [*OPTIONS, *os.environ.get("CFLAGS", "").split()]
        include = sysconfig.get_path("include")
        made = target.with_suffix(f".{os.getpid()}")
        command = [*compiler, *options, f"-I{include}", str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            problem: str | None = str(error)
        else:
            problem = f"{done.stderr}{compiler[0]} ended with {done.returncode}"
            if done.returncode == 0:
                # In one step: processes that run have the old one open.
                made.replace(target)
                return None
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
        return problem
