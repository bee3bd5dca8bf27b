"""The caller's end of the fork server: start it, hear which workers ended, end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

from telegrad.launch.job import (
    Ended,
    EndWorkers,
    NotStarted,
    Orders,
    Replace,
    Report,
    Supervise,
    ThreadsBeforeFork,
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

    `on_failure(sentence)` is called, in a thread of its own, when a worker ends badly or cannot
    be started.
    """

    def __init__(
        self, orders: Orders, env: Mapping[str, str], on_failure: Callable[[str], None]
    ) -> None:
        self._env = env
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._ended: list[Ended] = []
        self._running = {seat.name for seat in orders.seats}
        self._gone = False
        self._ending = False
        self._start(orders)
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
                [sys.executable, "-c", _BOOT.format(path=list(orders.path), args=args)],
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

    def failures(self) -> list[Ended]:
        """The workers that ended badly by themselves, in the order in which they did."""
        with self._changed:
            return [ended for ended in self._ended if ended.failed]

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
        with self._changed:
            self._ending = True
        with contextlib.suppress(OSError):
            self._channel.send(EndWorkers())
        try:
            self.wait(_END_SECONDS)
        finally:  # a second Ctrl-C means: at once
            self._end_at_once()

    def _end_at_once(self) -> None:
        # Before the server is reaped its process id, which is the group's, cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self.wait(_END_SECONDS)
        os.close(self._lifeline)

    def replace(self, rank: int, life: int) -> None:
        """The job has lost this worker: its process, if it still runs, makes room for another."""
        with contextlib.suppress(OSError):
            self._channel.send(Replace(rank, life))

    def _listen(self, orders: Orders) -> None:
        try:
            while True:
                report: Report = self._channel.recv()
                match report:
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
            os.close(self._lifeline)
            self._start(orders)

    def _server_is_gone(self) -> None:
        with self._changed:
            unexpected = not self._ending and bool(self._running)
            self._gone = True
            self._changed.notify_all()
        if unexpected:
            self._on_failure(
                "the process that starts the workers ended by itself; its standard error says why"
            )
