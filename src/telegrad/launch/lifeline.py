"""No process outlives the one that started it.

Two means, because each has a hole that the other closes. The kernel can be asked to signal a
process when its parent dies: certain even while the process is busy in C code, but Linux only.
A pipe whose writing end only the caller holds ends when the caller does, however it does:
portable, but a thread must be able to run in order to see it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies. Call it in the process's main thread."""
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        # It died before the kernel was asked.
        os._exit(1)


def outlive_parent() -> None:
    _set_parent_death_signal(0)


def watch(lifeline: int) -> None:
    """End this process at once when the writing end of the pipe `lifeline` is gone."""

    def wait_for_end() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, name="telegrad-lifeline", daemon=True).start()


def _set_parent_death_signal(number: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
