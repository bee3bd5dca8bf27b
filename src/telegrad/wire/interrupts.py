"""Signal handlers that raise, and do not tear the transport apart.

Python runs the handler of a signal between any two instructions of the main thread, and what it
raises (`KeyboardInterrupt` at Ctrl-C, the error of a timeout that was built on `signal.alarm`) is
raised there. In the middle of a write or a read that would cost more than the call that was
interrupted: a frame that has its number but was never kept, bytes that were taken from the socket
and are in no buffer. The link to that worker would be lost to every thread.

So while a worker is in a job, or one is started or ended here, a handler runs at once only where
nothing can be torn: in user code, and in waits that hold nothing (`may_be_interrupted`). Else it is
*put off*. It runs, and raises

- where the transport waits or is done and says that it may (`run_put_off`),
- or when the main thread is back in user code: a thread looks for that, and *knocks* by a signal.

Every wait of the transport comes to such a point soon: it looks now and then whether something was
put off, and ends as it does at a deadline. Should one not, the handler is run there after `LONGEST`
in one and the same wait. It must not come to that in the transport itself, which would take the
error of a handler (a `TimeoutError` is an `OSError`) for one of its own.

Handlers that the program sets meanwhile are treated so as well. For that `signal.signal` and
`signal.getsignal`, which Python writes as calls of `_signal`, get our own functions there; the
program sees its own handlers only. A handler that is replaced while it is put off is run in the
step that replaces it: the signal came before.

To knock with the signal that was put off would double it for event loops, which hear of signals by
a descriptor (`signal.set_wakeup_fd`). So the knock is SIGURG: by default it is ignored, libraries
have no use for it, and who has must expect it for no reason. Handlers of it go on to work.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import numpy
import torch

PAUSE = 0.002
LONGEST = 2.0
GLANCE = 0.05
_LONGEST_WAIT = 3600.0
KNOCK = int(signal.SIGURG)

Handler = Callable[[int, FrameType | None], Any]
_F = TypeVar("_F", bound=Callable[..., Any])

put_off: dict[int, None] = {}
"""The signals whose handlers are put off, in the order in which they came."""

_PACKAGE = Path(__file__).parents[1]
_SHIELDED = tuple(f"{_PACKAGE / room}/" for room in ("wire", "rpc", "autograd", "launch"))
_STANDARD = f"{Path(threading.__file__).parent}/"
_TRANSPARENT = (
    "<frozen ",
    "<__array_function__",
    f"{Path(numpy.__file__).parent}/",
    f"{Path(torch.__file__).parent}/",
)

_open: set[CodeType] = set()
_handlers: dict[int, Any] = {}
"""What the program has set for the signals that come to us."""
_knocked = False
"""The next SIGURG is our own."""
_knocking = False
_users: set[str] = set()
_insists: tuple[int, int] | None = None
"""The place (frame and instruction) at which what is put off is to run all the same."""
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal


def may_be_interrupted(function: _F) -> _F:
    """Mark a wait that holds nothing: what is raised there loses nothing."""
    _open.add(function.__code__)
    return function


@may_be_interrupted
def await_latch(latch: threading.Lock, seconds: float = -1) -> bool:
    """Wait for a lock that nobody else has to have released."""
    return latch.acquire(timeout=seconds)


def install(user: str) -> None:
    """Take care of the handlers that there are, and of those to come. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return
    _users.add(user)
    _signal.signal, _signal.getsignal = _signal_anew, _getsignal
    for number in signal.valid_signals():
        handler = _get(number)
        if handler is not _arrived and (callable(handler) or number == KNOCK):
            _signal_anew(int(number), signal.SIG_DFL if handler is None else handler)


def uninstall(user: str) -> None:
    """That one needs it no more. The last leaves the handlers as the program has set them."""
    global _knocked
    if threading.current_thread() is not threading.main_thread():
        return
    _users.discard(user)
    if _users:
        return
    if _signal.signal is _signal_anew:
        _signal.signal, _signal.getsignal = _set, _get
    for number, handler in list(_handlers.items()):
        if _get(number) is _arrived:
            _set(number, handler)
    _knocked = False
    run_put_off()


def has_put_off() -> bool:
    """Whether a handler waits until the calling thread is done with what it does."""
    return bool(put_off) and threading.current_thread() is threading.main_thread()


def run_put_off() -> None:
    """For the transport, where something may be raised: run the handlers that were put off."""
    if has_put_off():
        _run_all(sys._getframe(1))


def at_a_time(seconds: float) -> float:
    """Of a wait of so many seconds, how long the calling thread may wait before it looks whether
    something was put off: only the main thread has to."""
    on_main = threading.current_thread() is threading.main_thread()
    return max(0.0, min(seconds, GLANCE if on_main else _LONGEST_WAIT))


def _signal_anew(number: int, handler: Any) -> Any:
    """In the place of `_signal.signal`: a handler of Python is called by way of ours."""
    former = _getsignal(number)
    before = _set(number, _arrived if callable(handler) else handler)
    _handlers[number] = handler
    if number == KNOCK:
        _set(KNOCK, _arrived)
    if before is not _arrived:
        return before
    if number in put_off:
        del put_off[number]
        former(number, sys._getframe(1))
    return former


def _getsignal(number: int) -> Any:
    handler = _get(number)
    return _handlers[int(number)] if handler is _arrived else handler


def _arrived(number: int, frame: FrameType | None) -> None:
    """The handler of all signals that have one."""
    global _insists, _knocked
    if number == KNOCK and _knocked:
        _knocked = False
        if _may_run(frame):
            _insists = None
            _run_all(frame)
    elif not callable(_handlers[number]):
        return  # As a SIGURG that nobody handles.
    elif _may_run(frame):
        put_off.pop(number, None)
        _handlers[number](number, frame)
    else:
        put_off[number] = None
        _start_knocking()


def _may_run(frame: FrameType | None) -> bool:
    return frame is None or not _is_shielded(frame) or _place(frame) == _insists


def _run_all(frame: FrameType | None) -> None:
    while put_off:
        number = next(iter(put_off))
        del put_off[number]
        _handlers[number](number, frame)


def _is_shielded(frame: FrameType | None) -> bool:
    """The innermost frame that belongs to somebody decides."""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if code in _open:
            return False
        if file.startswith(_SHIELDED):
            return True
        if not _is_nobodys(frame, code, file):
            return False
        frame = frame.f_back
    return False


def _is_nobodys(frame: FrameType, code: CodeType, file: str) -> bool:
    """Whether it runs for whoever called it."""
    if file == "<string>":
        # A method that a dataclass or a named tuple has had made; else a program given by `-c`.
        # What makes a named tuple is a lambda, in a module that is there for nothing else.
        module = str(frame.f_globals.get("__name__"))
        return code.co_name.startswith("__") or module.startswith("namedtuple_")
    if file.startswith(_STANDARD):
        return "-packages" not in file
    return file.startswith(_TRANSPARENT)


def _place(frame: FrameType) -> tuple[int, int]:
    return id(frame), frame.f_lasti


# Knocking. No locks here: the handler that starts it may run in the middle of anything.


def _start_knocking() -> None:
    global _knocking
    if not _knocking:
        _knocking = True
        main = threading.main_thread().ident or 0
        try:
            _thread.start_new_thread(_knock, (main,))
        except RuntimeError:
            # No thread can be had: the next wait, or the next signal, is what is left.
            _knocking = False


def _knock(main: int) -> None:
    global _knocking, _knocked
    patience = _Patience(main)
    while True:
        _knocking = False
        if not put_off:
            return
        _knocking = True
        time.sleep(PAUSE)
        if patience.is_to_knock() and put_off and _get(KNOCK) is _arrived:
            _knocked = True
            signal.pthread_kill(main, KNOCK)


class _Patience:
    """Looks at where the main thread is, and for how long it has been in one wait."""

    def __init__(self, main: int) -> None:
        self._main = main
        self._place: tuple[int, int] | None = None
        self._looks = 0

    def is_to_knock(self) -> bool:
        global _insists
        frame = _frames().get(self._main)
        if frame is None or not _is_shielded(frame):
            self._looks = 0
            return True
        # Looks and not time, which also passes for a process that is stopped.
        place = _place(frame)
        self._looks = self._looks + 1 if place == self._place else 0
        self._place = place
        if self._looks * PAUSE > LONGEST:
            _insists = place
        return _insists == place


def _frames() -> dict[int, FrameType]:
    """Where the threads are. A collection in the middle of it might hand the interpreter on, to a
    thread that then waits for the list of threads, which is held here: both would wait for ever."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _forget() -> None:
    """A child has neither the signals of its parent nor the thread that knocks."""
    global _knocking, _knocked, _insists
    _knocking, _knocked, _insists = False, False, None
    put_off.clear()


os.register_at_fork(after_in_child=_forget)
