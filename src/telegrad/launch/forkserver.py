"""The fork server: it imports torch once, and every worker is a copy of it.

Importing torch takes about two seconds of a core, so that 64 workers on two cores would need a
minute; a fork takes milliseconds. A fork is safe only in a process with one thread: it copies
the thread that forks and nothing else, and a lock that another thread held stays locked for ever.
Hence the rules of this process:

1. It has one thread. Libraries that keep a pool of threads are told to use one (the caller sets
   `OMP_NUM_THREADS` and its kin), and nothing is computed here. If the user's script starts
   threads when it is imported, nothing is forked: the caller is told, and asks again for workers
   that run the script themselves.
2. It is the only parent of the workers, so it reaps them all, and it ends only after them.
3. The end of the control channel is the end of the caller: the workers are ended then too.
4. A worker that ends badly while the caller wants it so is forked once more, from the same clean
   state as the first. One that the others have lost but that still runs is ended for that.

While the workers run it passes on what they write to standard error, each line under the name of
its worker, and keeps the last lines: they tell why a worker ended. It never waits for whoever reads
there (streams.py): meanwhile it would not see that its caller has ended.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from telegrad.launch.job import (
    Conduct,
    Ended,
    EndWorkers,
    NotStarted,
    Orders,
    Prepared,
    Replace,
    Report,
    Seat,
    Supervise,
    ThreadsBeforeFork,
)
from telegrad.launch.lifeline import die_with_parent, outlive_parent
from telegrad.launch.script import install_empty_main, install_main
from telegrad.launch.streams import StandardError, occupy_standard_streams
from telegrad.launch.worker import work

_KEPT_LINES = 40
_PIPE_BYTES = 65536  # what a pipe holds
_TERM_SECONDS = 0.5
_PAUSE_BEFORE_FORK = 0.1


def main(control: int, lifeline: int, caller: int) -> None:
    """Serve the caller at the other end of the descriptor `control` until all workers ended."""
    die_with_parent(caller)
    occupy_standard_streams()
    channel: Connection = Connection(control)
    orders: Orders = channel.recv()
    try:
        conduct = prepare(orders)
    except BaseException:
        channel.send(NotStarted(traceback.format_exc()))
        return
    if _has_threads():
        channel.send(ThreadsBeforeFork())
        return
    channel.send(Prepared())
    server = ForkServer(channel)
    server_id = os.getpid()
    seat = server.fork_workers(orders.seats)
    if seat is None:
        outlive_parent()  # the loop sees the caller's end, and reaps the workers first
        seat = server.serve()
    if seat is not None:
        # A worker does not return into the server's frames and exit handlers.
        os._exit(work(seat, conduct, orders, lifeline, server_id))


def prepare(orders: Orders) -> Conduct:
    """Become what every worker starts from."""
    os.chdir(orders.directory)
    sys.path[:] = orders.path
    sys.argv[:] = orders.argv
    install_empty_main()
    if orders.main is not None and not orders.main_in_each:
        install_main(orders.main)
    _import_for_all()
    conduct: Conduct = pickle.loads(orders.conduct)
    # The collector would otherwise touch, and so copy, every page that the workers share.
    gc.collect()
    gc.freeze()
    return conduct


def _import_for_all() -> None:
    """What every worker would import by itself, for seconds, when it makes its first optimizer."""
    if "telegrad.optim" in sys.modules:
        importlib.import_module("torch._dynamo")


def _has_threads() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except FileNotFoundError:
        return threading.active_count() > 1


@dataclass
class _Child:
    """A worker as its parent sees it."""

    seat: Seat
    pid: int
    stderr: int
    partial: bytes = b""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


class ForkServer:
    """The workers that were forked here, and the loop that watches them."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._children: dict[int, _Child] = {}
        self._end_wanted = False
        self._caller_is_gone = False
        self._sent: signal.Signals | None = None  # to every worker
        # Of all selectors this one takes regular files, too: standard error may be one.
        self._selector = selectors.PollSelector()
        self._standard_error = StandardError()
        self._unread: list[_Child] = []  # for as long as standard error is behind
        self._exits: tuple[int, int] | None = None
        self._restarts = 0
        self._vacant: deque[Seat] = deque()
        self._said = False

    def fork_workers(self, seats: tuple[Seat, ...]) -> Seat | None:
        """Fork one worker for each seat. Returns that seat in the worker, None in the server."""
        for seat in seats:
            reading, writing = os.pipe()
            try:
                pid = os.fork()
            except OSError:
                os.close(reading)
                os.close(writing)
                raise
            if pid == 0:
                self._leave_server(reading, writing)
                return seat
            os.close(writing)
            os.set_blocking(reading, False)
            child = self._children[pid] = _Child(seat, pid, reading)
            self._watch_stderr(child)
        return None

    def _leave_server(self, reading: int, writing: int) -> None:
        os.dup2(writing, 2)
        os.close(reading)
        os.close(writing)
        for sibling in self._children.values():
            os.close(sibling.stderr)
        self._channel.close()
        self._selector.close()
        self._standard_error.close()
        if self._exits is not None:
            signal.set_wakeup_fd(-1)
            for descriptor in self._exits:
                os.close(descriptor)

    def serve(self) -> Seat | None:
        """Watch over the workers until all have ended. In one forked meanwhile: its seat."""
        self._watch_for_exits()
        self._selector.register(self._channel, selectors.EVENT_READ, self._hear_caller)
        self._reap()  # those that ended before the watch began
        while (self._children or self._vacant) and not self._end_wanted:
            if self._vacant:
                seat = self._fork_vacant(self._vacant.popleft())
                if seat is not None:
                    return seat
            else:
                self._turn(None)
        self._end_workers()
        self._write_the_rest()
        return None

    def _fork_vacant(self, seat: Seat) -> Seat | None:
        """As `fork_workers`. If the system gives no process just now, the others must not end for
        that: it is tried again."""
        try:
            return self.fork_workers((seat,))
        except OSError as error:
            self._vacant.append(seat)
            if not self._said:
                self._said = True
                self._say(f"telegrad: worker {seat.name!r} cannot be started anew yet: {error}")
            self._turn(_PAUSE_BEFORE_FORK)
            return None

    def _turn(self, timeout: float | None) -> bool:
        """Wait for something and see to it. Whether there was anything."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            # What came before in the same turn may have closed it.
            if key.fd in self._selector.get_map():
                key.data()
        return bool(ready)

    def _watch_for_exits(self) -> None:
        reading, writing = self._exits = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

        def some_ended() -> None:
            os.read(reading, 4096)
            self._reap()

        self._selector.register(reading, selectors.EVENT_READ, some_ended)

    def _hear_caller(self) -> None:
        try:
            match self._channel.recv():
                case Supervise(restarts):
                    self._restarts = restarts
                case Replace(rank, life):
                    self._replace(rank, life)
                case EndWorkers():
                    self._end_wanted = True
        except (EOFError, OSError):
            self._end_wanted = self._caller_is_gone = True
            self._selector.unregister(self._channel)

    def _replace(self, rank: int, life: int) -> None:
        if self._sent is not None:
            return  # All of them are being ended.
        for child in self._children.values():
            if self._restarts and (child.seat.rank, child.seat.life or 0) == (rank, life):
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid != 0:
                self._bury(child, os.waitstatus_to_exitcode(status))

    def _bury(self, child: _Child, exit_code: int) -> None:
        del self._children[child.pid]
        self._read(child)
        if child.partial:
            self._write_line(child, child.partial)
        if child.stderr in self._selector.get_map():
            self._selector.unregister(child.stderr)
        os.close(child.stderr)
        # Whatever else ended it came before our signal, and the caller wants to know.
        if self._sent is None or exit_code != -self._sent:
            again = exit_code != 0 and self._start_anew(child.seat)
            self._report(Ended(child.seat.name, exit_code, tuple(child.lines), again))

    def _start_anew(self, seat: Seat) -> bool:
        lives = seat.life or 0
        if self._sent is not None or lives >= self._restarts:
            return False
        self._vacant.append(replace(seat, life=lives + 1))
        return True

    def _report(self, report: Report) -> None:
        # A caller that is gone is seen by the loop, as the end of the channel.
        with contextlib.suppress(OSError):
            self._channel.send(report)

    def _forward(self, child: _Child) -> None:
        if self._standard_error.is_behind:
            self._selector.unregister(child.stderr)
            self._unread.append(child)
        else:
            self._read(child)

    def _read(self, child: _Child) -> None:
        """Pass on what the worker's pipe holds, and not what comes meanwhile: it may never end."""
        try:
            data = os.read(child.stderr, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            if child.stderr in self._selector.get_map():
                self._selector.unregister(child.stderr)
            return
        # A progress bar ends its lines with a carriage return.
        *lines, child.partial = (child.partial + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if line:
                self._write_line(child, line)

    def _write_line(self, child: _Child, line: bytes) -> None:
        text = line.decode(errors="replace")
        child.lines.append(text)
        self._say(f"[{child.seat.name}] {text}")

    def _say(self, line: str) -> None:
        if not self._standard_error:
            write = self._write_what_was_said
            self._selector.register(self._standard_error, selectors.EVENT_WRITE, write)
        self._standard_error.add(line)

    def _write_what_was_said(self) -> None:
        self._standard_error.write_some()
        if not self._standard_error:
            self._selector.unregister(self._standard_error)
        if not self._standard_error.is_behind:
            for child in self._unread:
                if child.pid in self._children:
                    self._watch_stderr(child)
            self._unread.clear()

    def _watch_stderr(self, child: _Child) -> None:
        forward = functools.partial(self._forward, child)
        self._selector.register(child.stderr, selectors.EVENT_READ, forward)

    def _write_the_rest(self) -> None:
        """What the workers wrote before they ended. The caller may not want to wait for it: then it
        ends this process. One that is gone cannot, and only what is sure to be written is."""
        while self._standard_error:
            if not self._turn(0.0 if self._caller_is_gone else None):
                return

    def _end_workers(self) -> None:
        deadline = time.monotonic() + _TERM_SECONDS
        self._signal_all(signal.SIGTERM)
        while self._children and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        self._signal_all(signal.SIGKILL)
        for child in list(self._children.values()):
            _, status = os.waitpid(child.pid, 0)
            self._bury(child, os.waitstatus_to_exitcode(status))

    def _signal_all(self, number: signal.Signals) -> None:
        self._sent = number
        for pid in self._children:
            os.kill(pid, number)
