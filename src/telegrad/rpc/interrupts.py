"""Ctrl-C that does not tear the transport apart.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. In the middle of
a write or a read that would cost more than the call that was interrupted: a frame that has its
number but was never kept, bytes that were taken from the socket and are in no buffer. The link to
that worker would be lost to every thread.

So while a worker is in a job, its main thread answers Ctrl-C in one of two ways, by the code that
it is just in. User code is interrupted at once, as ever, and so are waits that hold nothing (marked
by `may_be_interrupted`). The transport is left alone until it is out of what it does: a thread
knocks again every few milliseconds. Ctrl-C is never put off for longer than `LONGEST`.

A program that has a handler of its own for SIGINT keeps it.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import telegrad

PAUSE = 0.002
LONGEST = 0.5

_F = TypeVar("_F", bound=Callable[..., Any])
_PACKAGE = Path(telegrad.__file__).parent
_SHIELDED = tuple(f"{_PACKAGE / room}/" for room in ("wire", "rpc", "autograd"))
_TRANSPARENT = tuple(
    f"{Path(module.__file__ or '').parent}/" for module in (threading, sys.modules["torch"])
)
_open: set[CodeType] = set()
_put_off_since: float | None = None
_knocked = False
"""The next signal is, or may be, our own knocking."""


def may_be_interrupted(function: _F) -> _F:
    """Mark a wait that holds nothing: an interrupt there loses nothing."""
    _open.add(function.__code__)
    return function


def install() -> None:
    """Take care of Ctrl-C, if nobody else does."""
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def uninstall() -> None:
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_if_put_off() -> None:
    """For the transport, where it waits and an interrupt would lose nothing."""
    global _put_off_since
    if _put_off_since is not None and threading.current_thread() is threading.main_thread():
        _put_off_since = None
        raise KeyboardInterrupt


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _put_off_since, _knocked
    knocked, _knocked = _knocked, False
    if knocked and _put_off_since is None:
        return  # What it was about has been answered meanwhile.
    now = time.monotonic()
    if _is_shielded(frame) and (_put_off_since is None or now - _put_off_since < LONGEST):
        if _put_off_since is None:
            _put_off_since = now
            threading.Thread(target=_knock, name="telegrad-interrupt", daemon=True).start()
        return
    _put_off_since = None
    raise KeyboardInterrupt


def _is_shielded(frame: FrameType | None) -> bool:
    """The innermost frame that belongs to somebody decides."""
    while frame is not None:
        code = frame.f_code
        if code in _open:
            return False
        if code.co_filename.startswith(_SHIELDED):
            return True
        if not code.co_filename.startswith(_TRANSPARENT) or "site-packages" in code.co_filename:
            return False
        frame = frame.f_back
    return False


def _knock() -> None:
    global _knocked
    while _put_off_since is not None:
        time.sleep(PAUSE)
        if _put_off_since is not None:
            _knocked = True
            _thread.interrupt_main()
