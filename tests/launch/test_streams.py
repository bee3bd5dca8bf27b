"""What workers write to standard error arrives, and holds nothing up that must go on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad.launch.streams import StandardError
from tests.launch.test_local import wait_until_gone

SPEAKS = """
import os, sys, threading, time
import telegrad
from telegrad import rpc

def speak(lines):
    for number in range(lines):
        print("line", number, "y" * 40, file=sys.stderr)
        if number == 1600:  # More than a pipe holds: some were to be passed on by now.
            print("speaks", flush=True)

def speak_for_ever():
    threading.Thread(target=speak, args=(10**9,), daemon=True).start()
    return os.getpid(), os.getppid()

def for_ever():
    print(os.getpid(), *rpc.rpc_sync("worker1", speak_for_ever), flush=True)
    time.sleep(600)

def for_a_while():
    rpc.rpc_sync("worker1", speak, args=(5000,))

if __name__ == "__main__":
    telegrad.run(globals()[sys.argv[1]], workers=1)
"""


def start(tmp_path: Path, main: str, stderr: int) -> subprocess.Popen[str]:
    path = tmp_path / "job.py"
    path.write_text(SPEAKS)
    return subprocess.Popen(
        [sys.executable, path, main], stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def fill(pipe: int) -> None:
    """Leave no room for whoever writes to a pipe that nobody reads."""
    os.set_blocking(pipe, False)
    for size in (select.PIPE_BUF, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"x" * (size - 1) + b"\n")


@contextlib.contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Fail if the block waits for longer, wherever it does."""

    def fail(*_: object) -> None:
        pytest.fail(f"it waited for {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["pipe", "socket", "terminal"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Where to read, and where to write."""
    if request.param == "pipe":
        reading, writing = os.pipe()
    elif request.param == "terminal":
        reading, writing = os.openpty()
        tty.setraw(writing)
    else:
        reading, writing = (end.detach() for end in socket.socketpair())
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_others_may_leave_no_room_between_the_look_and_the_write(ends: tuple[int, int]) -> None:
    reading, writing = ends
    stream = StandardError(writing)
    stream.add("waits")
    fill(writing)
    os.set_blocking(writing, True)
    with in_time(10):
        stream.write_some()
    os.set_blocking(reading, False)
    seen = b""
    while stream or not seen.endswith(b"waits\n"):
        with contextlib.suppress(BlockingIOError):
            seen += os.read(reading, 65536)
        stream.write_some()
    assert os.get_blocking(writing)
    stream.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_end_with_a_caller_that_is_killed_while_nobody_reads_standard_error(
    tmp_path: Path, number: signal.Signals
) -> None:
    reading, writing = os.pipe()
    script = start(tmp_path, "for_ever", writing)
    assert script.stdout is not None
    try:
        pids = [int(word) for word in script.stdout.readline().split()]
        assert len(pids) == 3
        fill(writing)
        os.set_blocking(writing, True)
        script.send_signal(number)
        script.wait(30)
        wait_until_gone(pids[1:], 30.0)
    finally:
        script.kill()
        script.wait()
        script.stdout.close()
        os.close(reading)
        os.close(writing)


def test_no_line_is_lost_on_a_standard_error_that_does_not_block_and_is_read_late(
    tmp_path: Path,
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # As one that is shared with ssh or an event loop.
    script = start(tmp_path, "for_a_while", writing)
    assert script.stdout is not None
    try:
        fill(writing)
        assert script.stdout.readline() == "speaks\n"
        os.close(writing)
        with open(reading, "rb") as file:
            text = file.read()
        assert script.wait(60) == 0
        assert text.count(b"[worker1] line ") == 5000
    finally:
        script.kill()
        script.wait()
        script.stdout.close()
