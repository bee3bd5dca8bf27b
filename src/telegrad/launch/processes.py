"""The caller's end of the fork server: start it, hear which workers ended, end them all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

from telegrad.launch.job import (
    Ended,
    EndWorkers,
    NotStarted,
    Orders,
    Prepared,
    Replace,
    Report,
    Supervise,
    ThreadsBeforeFork,
    describe_exit,
)
from telegrad.wire.interrupts import may_be_interrupted

_END_SECONDS = 2.0
# What is computed in the fork server must not start threads; see forkserver.py.
_POOL_SIZES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_BOOT = "import sys; sys.path[:] = {path!r}; import telegrad.launch.forkserver as f; f.main{args!r}"


class LocalProcesses:
    """The fork server of one job and its workers.

    `on_prepared()` is called when the workers are about to exist, `on_failure(sentence)` when one
    of them ends badly or cannot be started, `on_server_gone(sentence)` when the fork server has
    ended by itself: then no worker is left, and none will come. All in a thread of its own.
    """

    def __init__(
        self,
        orders: Orders,
        env: Mapping[str, str],
        on_prepared: Callable[[], None],
        on_failure: Callable[[str], None],
        on_server_gone: Callable[[str], None],
    ) -> None:
        self._env = env
        self._on_prepared = on_prepared
        self._on_failure = on_failure
        self._on_server_gone = on_server_gone
        self._changed = threading.Condition()
        self._ended: list[Ended] = []
        self._running = {seat.name for seat in orders.seats}
        self._gone = False
        self._ending = False
        self._end_of_server: str | None = None
        self.are_of_parent = False
        """Whether this is a process that was forked from the caller: all this is not its own."""
        self._start(orders)
        _started_here.add(self)
        try:
            threading.Thread(
                target=self._listen, args=(orders,), name="telegrad-launch", daemon=True
            ).start()
        except RuntimeError:
            # No thread can be had: nobody would ever end what was just started.
            self._gone = True
            self._end_at_once()
            self._channel.close()
            raise

    def _start(self, orders: Orders) -> None:
        ours, theirs = socket.socketpair()
        # Only this process holds the writing end; it is never written to.
        reading, self._lifeline = os.pipe()
        args = (theirs.fileno(), reading, os.getpid())
        try:
            # A process group of its own keeps Ctrl-C of the terminal from the workers (they are
            # ended from here) and lets one signal reach whatever they started themselves.
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    *interpreter_flags(),
                    "-c",
                    _BOOT.format(path=list(orders.path), args=args),
                ],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._env, **dict.fromkeys(_POOL_SIZES, "1")},
                pass_fds=(theirs.fileno(), reading),
                process_group=0,
            )
        finally:
            theirs.close()
            os.close(reading)
        self._channel: Connection = Connection(ours.detach())
        with contextlib.suppress(BrokenPipeError):  # then the listener reports how it ended
            self._channel.send(orders)

    def failures(self) -> list[str]:
        """What ended badly by itself, in the order in which it did: a sentence for each."""
        with self._changed:
            failures = [str(ended) for ended in self._ended if ended.failed]
            return failures if self._end_of_server is None else [*failures, self._end_of_server]

    def supervise(self, restarts: int) -> None:
        """From now on a worker that ends badly is started anew, up to so many times."""
        with contextlib.suppress(OSError):  # then the listener reports how the server ended
            self._channel.send(Supervise(restarts))

    @may_be_interrupted
    def wait(self, timeout: float) -> bool:
        """Wait until every worker has ended by itself."""
        with self._changed:
            return self._changed.wait_for(lambda: self._gone, timeout)

    def end(self) -> None:
        """End every worker, reap the fork server, and leave nothing of either behind."""
        try:
            if self._server_has_hung_up():
                self.wait(_END_SECONDS)  # for the listener, which tells whose doing that was
            with self._changed:
                self._ending = True
            with contextlib.suppress(OSError):
                self._channel.send(EndWorkers())
            self.wait(_END_SECONDS)
        finally:  # a second Ctrl-C means: at once
            self._end_at_once()

    def _server_has_hung_up(self) -> bool:
        look = select.poll()
        look.register(self._channel, 0)
        return bool(look.poll(0))

    def _end_at_once(self) -> None:
        # Before the server is reaped its process id, which is the group's, cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self.wait(_END_SECONDS)
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    def leave_to_parent(self) -> None:
        """In a process that was forked from the caller, whose end the workers must see though this
        one goes on."""
        self.are_of_parent = True
        self._channel.close()
        self._close_lifeline()

    def replace(self, rank: int, life: int) -> None:
        """The job has lost this worker: its process, if it still runs, makes room for another."""
        with contextlib.suppress(OSError):
            self._channel.send(Replace(rank, life))

    def _listen(self, orders: Orders) -> None:
        try:
            while True:
                report: Report = self._channel.recv()
                match report:
                    case Prepared():
                        self._on_prepared()
                    case Ended():
                        self._worker_ended(report)
                    case NotStarted(traceback=text):
                        self._on_failure(f"the workers could not be prepared:\n{text}")
                    case ThreadsBeforeFork():
                        self._start_again(replace(orders, main_in_each=True))
        except (EOFError, OSError):
            self._server_is_gone()

    def _worker_ended(self, report: Ended) -> None:
        with self._changed:
            self._ended.append(report)
            if not report.started_anew:
                self._running.discard(report.name)
        if report.failed:
            self._on_failure(str(report))

    def _start_again(self, orders: Orders) -> None:
        with self._changed:
            if self._ending:
                return
            self._server.wait()
            self._channel.close()
            self._close_lifeline()
            self._start(orders)

    def _server_is_gone(self) -> None:
        with self._changed:
            unexpected = not self._ending and bool(self._running)
        why = self._describe_end_of_server() if unexpected else None
        with self._changed:
            self._end_of_server = why
            self._gone = True
            self._changed.notify_all()
        if why is not None:
            self._on_server_gone(why)

    def _describe_end_of_server(self) -> str:
        code = self._exit_code_of_server()
        how = "" if code is None else f": it {describe_exit(code)}"
        where = "" if code is not None and code < 0 else "; its standard error says why"
        return (
            f"the process that starts the workers ended by itself{how}{where}. The workers ended "
            "with it, and none is started anew"
        )

    def _exit_code_of_server(self) -> int | None:
        """It is looked at, not reaped (see `_end_at_once`). None where that cannot be done."""
        if not hasattr(os, "waitid"):
            return None
        try:
            end = os.waitid(os.P_PID, self._server.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped meanwhile, or by the program itself
            return self._server.returncode
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def interpreter_flags() -> list[str]:
    """The options of this interpreter, as `-O` and `-W error`, for another one.

    They are found as `multiprocessing` finds them for its processes; nothing public does it.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


_started_here: weakref.WeakSet[LocalProcesses] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for processes in list(_started_here):
        processes.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
