"""The examples of docs/rpc.md run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.outgoing import MAX_CALLS_IN_FLIGHT
from telegrad.wire.frames import LIMITS as FRAME_LIMITS
from telegrad.wire.outbox import QUEUE_BYTES
from telegrad.wire.trust import LIMITS
from tests.documents import code_in, output_of, page

TEXT = page("rpc.md")
BLOCKS = code_in(TEXT)
SCRIPTS = [block for block in BLOCKS if block.startswith("# script")]
FRAGMENTS = [block for block in BLOCKS if block not in SCRIPTS]


@pytest.mark.parametrize("code", FRAGMENTS)
@pytest.mark.usefixtures("workers")
def test_a_fragment_runs(code: str) -> None:
    exec(code, {"rpc": rpc, "torch": torch, "asyncio": asyncio})


@pytest.mark.parametrize("code", SCRIPTS)
def test_a_script_runs(code: str, tmp_path: Path) -> None:
    assert "tensor([3., 3.])" in output_of(code, tmp_path, timeout=100)


def test_the_limits_are_those_that_the_text_tells() -> None:
    assert f"{MAX_CALLS_IN_FLIGHT:,} calls in flight" in TEXT
    assert f"more than {QUEUE_BYTES >> 20} MB" in TEXT
    assert f"at most {FRAME_LIMITS.frame_bytes >> 30} GB" in TEXT
    assert f"bytes {LIMITS.meta >> 30} GB" in TEXT
    assert f"{LIMITS.items // 10**6} million elements" in TEXT
    assert f"nesting {LIMITS.depth} levels" in TEXT
