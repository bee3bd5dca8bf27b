"""A process ends with its own exit code, whatever its threads are in."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import run_script

SCRIPT = Path(__file__).parent / "scripts" / "exit_while_computing.py"


def test_a_thread_that_computes_for_long_does_not_abort_the_process() -> None:
    """It comes back from torch while the interpreter ends, and again and again: some do so by a
    call, some by an autograd engine that runs nodes in Python."""
    done = run_script(SCRIPT, "3", timeout=60)
    assert done.stdout == "left\nlast word\n"
    assert (done.returncode, done.stderr) == (3, "")
