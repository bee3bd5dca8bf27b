"""telegrad is built with compiled short cuts where there is a compiler, and without elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from telegrad.wire import quick
from tests.documents import ROOT

COMPILER = shutil.which("cc") or shutil.which("gcc")


def built(tmp_path: Path, **environment: str) -> tuple[str, list[str]]:
    """The name of the wheel that is built of a copy of the tree, and the libraries that it has."""
    tree = tmp_path / "a tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path / "wheels"), str(tree)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
def test_short_cuts_are_compiled_where_there_is_a_compiler(tmp_path: Path) -> None:
    assert quick.BUILT, "run make again: they are compiled when telegrad is installed"
    name, libraries = built(tmp_path)
    assert "none-any" not in name
    assert [Path(library).name.partition(".")[0] for library in libraries] == ["_native"]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_telegrad_is_built_all_the_same(tmp_path: Path, compiler: str) -> None:
    name, libraries = built(tmp_path, CC=compiler)
    assert name.endswith("py3-none-any.whl")
    assert libraries == [], "also none of an earlier build"
