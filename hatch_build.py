"""Compiles the parts of telegrad that are C++ when it is built or installed.

They use the headers of the torch that is installed beside the interpreter, and work with that torch
alone. Without a compiler or without torch telegrad is built all the same, and takes longer for
small messages and small graphs.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (Path("src/telegrad/wire/_native.cpp"), Path("src/telegrad/autograd/_graph.cpp"))
OPTIONS = ("-O2", "-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fPIC", "-shared")
HIDDEN = "-fvisibility=hidden"
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        for source, target, problem in compile_all(Path(self.root)):
            if problem is not None:
                self.app.display_warning(f"{source} was not compiled: {problem}")
                continue
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"].append(str(target))


def compile_all(root: Path) -> list[tuple[Path, Path, str | None]]:
    """The sources of a tree, what each became, and what went wrong."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    targets = [source.with_suffix(suffix) for source in SOURCES]
    with ThreadPoolExecutor() as pool:
        problems = pool.map(
            _compile, *[[root / each for each in side] for side in (SOURCES, targets)]
        )
        return list(zip(SOURCES, targets, problems, strict=True))


def _installed_torch() -> tuple[Path, str]:
    """Where it lies, and its version. It is not imported: a build in isolation does not see it."""
    for place in ("platlib", "purelib"):
        folder = Path(sysconfig.get_path(place)) / "torch"
        with contextlib.suppress(OSError):
            found = re.search(
                r"^__version__ = ['\"](.+)['\"]", (folder / "version.py").read_text(), re.MULTILINE
            )
            if found is not None:
                return folder, found.group(1)
    raise OSError("there is no torch beside this interpreter")


def _command(source: Path, target: Path) -> list[str]:
    torch, version = _installed_torch()
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    return [
        *compiler,
        *OPTIONS,
        HIDDEN,
        *os.environ.get("CXXFLAGS", "").split(),
        f"-I{sysconfig.get_path('include')}",
        *[option for folder in headers for option in ("-isystem", str(folder))],
        f'-DTELEGRAD_TORCH="{version}"',
        str(source),
        "-o",
        str(target),
        f"-L{torch / 'lib'}",
        *LIBRARIES,
    ]


def _compile(source: Path, target: Path) -> str | None:
    """What went wrong, if anything did; then no library of an earlier build is left either."""
    made = target.with_suffix(f".{os.getpid()}")
    try:
        command = _command(source, made)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        problem = str(error)
    else:
        if done.returncode == 0:
            # In one step: processes that run have the old one open.
            made.replace(target)
            return None
        problem = f"{done.stderr}{command[0]} ended with {done.returncode}"
    with contextlib.suppress(OSError):
        target.unlink(missing_ok=True)
    return problem


if __name__ == "__main__":
    # Another tree than this one, with other CXXFLAGS: see `make sanitize`.
    found = [problem for *_, problem in compile_all(Path(sys.argv[1])) if problem is not None]
    sys.exit("\n".join(found) or None)
