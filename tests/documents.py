"""The documentation as tests read it: its pages, and the code in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def code_in(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def output_of(script: str, directory: Path, timeout: float) -> str:
    """What a script of the documentation prints, which must not fail."""
    path = directory / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
