"""The examples of docs/rpc.md run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.outgoing import MAX_CALLS_IN_FLIGHT
from telegrad.wire.frames import LIMITS as FRAME_LIMITS
from telegrad.wire.outbox import QUEUE_BYTES
from telegrad.wire.trust import LIMITS
from tests.rpc.fleet import ROOT

TEXT = (ROOT / "docs" / "rpc.md").read_text()
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SCRIPTS = [block for block in BLOCKS if block.startswith("# script")]
FRAGMENTS = [block for block in BLOCKS if block not in SCRIPTS]


@pytest.mark.parametrize("code", FRAGMENTS)
@pytest.mark.usefixtures("workers")
def test_a_fragment_runs(code: str) -> None:
    exec(code, {"rpc": rpc, "torch": torch, "asyncio": asyncio})


@pytest.mark.parametrize("code", SCRIPTS)
def test_a_script_runs(code: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, path], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "tensor([3., 3.])" in done.stdout


def test_the_limits_are_those_that_the_text_tells() -> None:
    assert f"{MAX_CALLS_IN_FLIGHT:,} calls in flight" in TEXT
    assert f"more than {QUEUE_BYTES >> 20} MB" in TEXT
    assert f"at most {FRAME_LIMITS.frame_bytes >> 30} GB" in TEXT
    assert f"bytes {LIMITS.meta >> 30} GB" in TEXT
    assert f"{LIMITS.items // 10**6} million elements" in TEXT
    assert f"nesting {LIMITS.depth} levels" in TEXT
