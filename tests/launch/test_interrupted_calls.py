"""Ctrl-C in the calls of a main function: it is told, and the next call goes through."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import run_script

SCRIPT = """
import os
import random
import signal
import threading

import telegrad
from telegrad import rpc

INTERRUPTS = 200


def main():
    draw, caught, wanted = random.Random(20261116), 0, threading.Semaphore(0)

    def interrupt():
        for _ in range(INTERRUPTS):
            wanted.acquire()
            threading.Event().wait(draw.uniform(0.0, 0.002))
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    for _ in range(INTERRUPTS):
        wanted.release()
        try:
            while True:
                rpc.rpc_sync("worker1", abs, args=(-1,))
        except KeyboardInterrupt:
            caught += 1
        assert rpc.rpc_sync("worker1", abs, args=(-1,), timeout=20) == 1
    return caught


if __name__ == "__main__":
    print("caught", telegrad.run(main, workers=1))
"""


def test_calls_that_are_interrupted_leave_the_link_to_those_that_follow(tmp_path: Path) -> None:
    """Ctrl-C comes to the thread that runs main, which is not the one that joined the job."""
    script = tmp_path / "interrupted.py"
    script.write_text(SCRIPT)
    done = run_script(script, timeout=60)
    assert done.stdout == "caught 200\n", done.stderr[-2000:]
