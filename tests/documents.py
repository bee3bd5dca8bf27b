"""The documentation as tests read it: its pages, and the code in them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.scripts import run_script

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def code_in(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def output_of(script: str, directory: Path, timeout: float) -> str:
    """What a script of the documentation prints, which must not fail."""
    path = directory / "script.py"
    path.write_text(script)
    done = run_script(
        path,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
