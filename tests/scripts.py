"""Scripts that tests run in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def run_script(
    *command: str | Path,
    timeout: float = 100,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments. If it does not end, the test fails with where it was."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        try:
            out, errors = process.communicate(timeout=10)
        finally:
            process.kill()
        pytest.fail(f"the script did not end within {timeout:g} s:\n{out}\n{errors}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)
