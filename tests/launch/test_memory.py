"""What a worker frees it has for the next step, and need not ask the system for again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource
import torch
import telegrad
from telegrad import rpc

def use_and_free(times):
    for _ in range(times):
        made = [torch.ones(1 << 18) for _ in range(6)]
        del made

def pages_of_ten_steps():
    use_and_free(5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use_and_free(10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def main():
    print(rpc.rpc_sync("worker1", pages_of_ten_steps))

if __name__ == "__main__":
    telegrad.run(main, workers=1)
"""
PAGES_OF_A_STEP = 6 * (1 << 20) // 4096


@pytest.mark.parametrize("own_setting", [{}, {"MALLOC_TRIM_THRESHOLD_": "0"}])
def test_a_worker_keeps_what_it_frees_unless_its_user_says_otherwise(
    tmp_path: Path, own_setting: dict[str, str]
) -> None:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    output = subprocess.run(
        [sys.executable, path], env=environment | own_setting, capture_output=True, check=True
    ).stdout
    keeps = int(output) < PAGES_OF_A_STEP
    assert keeps == (not own_setting)
