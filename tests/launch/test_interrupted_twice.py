"""A user who presses Ctrl-C again wants it to end now, not to be left with what runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, subprocess, threading, time
import telegrad
from telegrad import rpc


def hang():
    time.sleep(600)


def main():
    for seconds in (1, 1.02):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    rpc.rpc_sync("a", hang)


if __name__ == "__main__":
    try:
        telegrad.run(main, workers=["a"])
    except KeyboardInterrupt:
        found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True)
        print("left:", found.stdout.split(), rpc.is_initialized())
"""


def test_a_second_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "left: [] False" in ended.stdout, ended.stdout + ended.stderr
