"""A script of stock torch RPC runs on telegrad without a change, its children included."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import telegrad.compat
from tests.scripts import run_script

SCRIPT = Path(__file__).parent / "scripts" / "parameter_server.py"
COMPAT = Path(telegrad.compat.__file__).parent
LOSSES = "losses [0.159995, 0.094575, 0.03803]"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TELEGRAD_COMPAT"}
    return run_script(*command, timeout=110, env={**inherited, **environment})


def test_a_script_and_the_processes_that_it_spawns_run_on_telegrad(tmp_path: Path) -> None:
    done = run("-m", "telegrad.compat", str(SCRIPT), str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert "runs on telegrad" in done.stdout
    assert LOSSES in done.stdout


def test_the_variable_alone_is_enough(tmp_path: Path) -> None:
    path = os.pathsep.join([str(COMPAT / "site"), str(COMPAT.parent.parent)])
    done = run(str(SCRIPT), str(tmp_path / "store"), TELEGRAD_COMPAT="1", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "runs on telegrad" in done.stdout
    assert LOSSES in done.stdout


def test_stock_computes_the_same(tmp_path: Path) -> None:
    done = run(str(SCRIPT), str(tmp_path / "store"), TELEGRAD_COMPAT="0")
    assert done.returncode == 0, done.stderr
    assert "runs on torch" in done.stdout
    assert LOSSES in done.stdout


def test_a_process_without_torch_pays_nothing() -> None:
    look = "import sys; print(sorted({'torch', 'telegrad'} & sys.modules.keys()))"
    path = str(COMPAT / "site")
    done = run("-c", look, TELEGRAD_COMPAT="1", PYTHONPATH=path)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: telegrad compat"),
        (["missing.py"], "there is no script missing.py"),
        (["-m"], "-m needs the name of a module"),
    ],
)
def test_wrong_arguments_are_answered_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert telegrad.compat.run_script(arguments) == 2
    heard = capsys.readouterr()
    assert said in heard.out + heard.err
