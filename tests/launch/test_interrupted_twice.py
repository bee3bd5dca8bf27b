"""A user who presses Ctrl-C again wants it to end now, not to be left with what runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.scripts import run_script

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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The second may come only now.
        found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True)
        print("left:", found.stdout.split(), rpc.is_initialized())
"""


def test_a_second_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run_script(script)
    assert "left: [] False" in ended.stdout, ended.stdout + ended.stderr


STARTING = """
import os, signal, threading, time
import telegrad


def interrupt_thrice():
    while not any(each.name == "telegrad-join" for each in threading.enumerate()):
        time.sleep(0.001)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)


if __name__ == "__main__":
    threading.Thread(target=interrupt_thrice).start()
    try:
        telegrad.run(print, workers=2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        joining = any(each.name == "telegrad-join" for each in threading.enumerate())
        print("still joining:", joining, "left:", os.listdir(os.environ["XDG_RUNTIME_DIR"]))
"""


def test_ctrl_c_while_a_job_starts_ends_whole_however_often_it_is_pressed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTING)
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:  # a socket's path has to be short
        ended = run_script(script, env={**os.environ, "XDG_RUNTIME_DIR": directory})
    assert ended.stdout == "still joining: False left: []\n", ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stderr


LOOP = """
import asyncio, functools, os, signal, threading
import telegrad


async def tick():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(400):
        await asyncio.sleep(0.04)
    print("not interrupted for 16 seconds")


if __name__ == "__main__":
    try:
        telegrad.run(functools.partial(asyncio.run, tick()), workers=1)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_ends_a_main_that_a_library_runs(tmp_path: Path) -> None:
    """Between the launch and where it waits there is no frame of the program."""
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    ended = run_script(script)
    assert ended.stdout == "interrupted\n", ended.stdout + ended.stderr
