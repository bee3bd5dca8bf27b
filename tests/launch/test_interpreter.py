"""Workers are interpreters like that of main: what its script, its options and its streams are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

ANNOTATED = """
import telegrad
from telegrad import rpc

def annotated(x: int) -> None: ...

def kind():
    return type(annotated.__annotations__["x"]).__name__

def main():
    print(kind(), rpc.rpc_sync("worker1", kind))

if __name__ == "__main__":
    telegrad.run(main, workers=1)
"""


def test_the_future_statements_of_a_script_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(ANNOTATED)
    done = run_script(path)
    assert done.stdout.split() == ["type", "type"], done.stderr
    path.write_text(f"from __future__ import annotations\n{ANNOTATED}")
    done = run_script(path)
    assert done.stdout.split() == ["str", "str"], done.stderr


WITHOUT_A_FILE = """
import telegrad
from telegrad import rpc

def f(): ...
def sys(): ...
def g(): ...

def main():
    for function in (f, sys, g):
        try:
            rpc.rpc_sync("worker1", function)
        except rpc.CodecError as error:
            print(error)

telegrad.run(main, workers=1)
"""


def test_no_name_of_a_program_without_a_file_is_found_in_what_started_the_worker() -> None:
    done = run_script("-c", WITHOUT_A_FILE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, name in zip(lines, ("f", "sys", "g"), strict=True):
        assert f"__main__:{name} is not found on this worker" in line


LOOKS = """
import pathlib, sys
import telegrad
from telegrad import rpc

sys.path.insert(0, pathlib.Path(__file__).parent / "nowhere")

def look():
    return sys.warnoptions, sys.flags.dont_write_bytecode, sys.flags.dev_mode, sys._xoptions

def main():
    print(look())
    print(rpc.rpc_sync("worker1", look))

if __name__ == "__main__":
    telegrad.run(main, workers=1)
"""


def test_options_of_the_interpreter_reach_workers_and_a_path_that_is_no_string_does_no_harm(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.py"
    path.write_text(LOOKS)
    done = run_script("-B", "-X", "utf8", "-W", "ignore::FutureWarning", path)
    assert done.returncode == 0, done.stderr
    here, there = done.stdout.splitlines()
    assert "ignore::FutureWarning" in here
    assert there == here


def test_what_is_relied_upon_to_pass_on_the_options_of_an_interpreter() -> None:
    """`interpreter_flags` uses what the standard library keeps for itself."""
    code = "from telegrad.launch.processes import interpreter_flags; print(*interpreter_flags())"
    done = run_script("-B", "-W", "ignore::FutureWarning", "-X", "utf8", "-c", code)
    assert done.stdout.split() == ["-B", "-Wignore::FutureWarning", "-X", "utf8"], done.stderr


QUIET = """
import sys
import telegrad
from telegrad import rpc

def main():
    assert rpc.rpc_sync("worker1", abs, args=(-3,)) == 3
    with open(sys.argv[1], "w") as file:
        file.write("done")

if __name__ == "__main__":
    telegrad.run(main, workers=1)
"""


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_workers_start_and_end_well_where_standard_streams_are_closed(
    tmp_path: Path, closed: str
) -> None:
    path = tmp_path / "job.py"
    path.write_text(QUIET)
    command = f'exec "$0" "$1" "$2" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, path, tmp_path / "result"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    assert (tmp_path / "result").read_text() == "done"
    assert done.returncode == 0
    assert done.stderr == ""
