"""telegrad is built with compiled parts where there is a compiler, and without elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from telegrad import native
from tests.documents import ROOT

COMPILER = shutil.which("c++") or shutil.which("g++")


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
def test_parts_are_compiled_where_there_is_a_compiler(tmp_path: Path) -> None:
    for module in native.MODULES:
        assert native.compiled(module), (
            "run make again: they are compiled when telegrad is installed"
        )
    name, libraries = built(tmp_path)
    assert "none-any" not in name
    made = {library.partition(".")[0].replace("/", ".") for library in libraries}
    assert made == {*native.MODULES}


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_telegrad_is_built_all_the_same(tmp_path: Path, compiler: str) -> None:
    name, libraries = built(tmp_path, CXX=compiler)
    assert name.endswith("py3-none-any.whl")
    assert libraries == [], "also none of an earlier build"


@pytest.mark.parametrize("works", [True, False])
def test_the_program_that_compiles_a_tree_says_whether_it_did(tmp_path: Path, works: bool) -> None:
    compiler = tmp_path / "compiler"
    # It makes what stands behind -o.
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; touch "$2"\n'
        if works
        else "#!/bin/sh\necho no, thanks >&2; exit 3\n"
    )
    compiler.chmod(0o755)
    for module in native.MODULES:
        (tmp_path / "src" / module.replace(".", "/")).parent.mkdir(parents=True)
    run = subprocess.run(
        [sys.executable, str(ROOT / "hatch_build.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": str(compiler)},
    )
    assert run.returncode == (0 if works else 1), run.stderr
    assert ("no, thanks" in run.stderr) == (not works)
    assert len([*tmp_path.rglob("*.so")]) == (len(native.MODULES) if works else 0)


OTHER = """
#include "native.h"
static int execute(PyObject *module) { return built_for_this_torch() ? 0 : -1; }
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "other", "", 0, NULL, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_other(void) { return PyModuleDef_Init(&definition); }
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
@pytest.mark.parametrize("version", ["0.1.2+other", torch.__version__])
def test_what_was_compiled_for_another_torch_is_not_used(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "other.cpp"
    source.write_text(OTHER)
    folders = [ROOT / "src/telegrad", sysconfig.get_path("include")]
    library = source.with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
    subprocess.run(
        [
            str(COMPILER),
            *("-fPIC", "-shared", *(f"-I{each}" for each in folders)),
            f'-DTELEGRAD_TORCH="{version}"',
            *(str(source), "-o", str(library)),
        ],
        check=True,
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other", raising=False)
    if version == torch.__version__:
        assert native.compiled("other") is not None
        assert native.why_not("other") == ""
    else:
        assert native.compiled("other") is None
        assert f"compiled for torch {version}" in native.why_not("other")


def test_the_environment_chooses_the_parts_that_are_not_compiled() -> None:
    program = "from telegrad.autograd import nodes; from telegrad.wire import quick; "
    program += "print(nodes.compiled, quick.BUILT)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "TELEGRAD_COMPILED": "0"},
    )
    assert run.stdout.split() == ["None", "False"], run.stderr
