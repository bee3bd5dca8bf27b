"""Processes for tests: forked in milliseconds, told what to do, killed at will.

A *nursery* is one process that has imported torch; every `Process` is a fork of it and runs, in its
main thread, the functions that the test sends, one after the other. A process joins a job, waits or
crashes because a test told it to: nothing is simulated. None outlives the test run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from telegrad import rpc
from telegrad.launch.lifeline import die_with_parent

ROOT = Path(__file__).parents[2]


class Nursery:
    """Forks processes until it is closed; then all of them end.

    The modules in `preload` are imported before, once for all of them.
    """

    def __init__(self, *preload: str) -> None:
        self._channel, theirs = socket.socketpair()
        path = [str(ROOT), str(ROOT / "src"), *sys.path]
        boot = (
            f"import sys; sys.path[:] = {path!r}; from tests.rpc import fleet; "
            + "".join(f"import {module}; " for module in preload)
            + f"fleet.fork_on_request({theirs.fileno()}, {os.getpid()})"
        )
        self._server = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def start(self) -> Process:
        ours, theirs = socket.socketpair()
        stderr, their_stderr = os.pipe()
        socket.send_fds(self._channel, [b"f"], [theirs.fileno(), their_stderr])
        theirs.close()
        os.close(their_stderr)
        return Process(Connection(ours.detach()), stderr)

    def close(self) -> None:
        self._channel.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def fork_on_request(descriptor: int, parent: int) -> None:
    """The nursery's own process."""
    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    me = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, 2)
        if not data:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(me)
            channel.close()
            commands, stderr = descriptors
            os.dup2(stderr, 2)
            os.close(stderr)
            os._exit(_obey(Connection(commands)))
        for each in descriptors:
            os.close(each)


def _obey(commands: Connection) -> int:
    faulthandler.register(signal.SIGUSR1)
    commands.send(os.getpid())
    while True:
        try:
            work, args, kwargs = pickle.loads(commands.recv_bytes())
        except EOFError:
            return 0
        try:
            answer = (True, work(*args, **kwargs))
        except BaseException as error:
            error.add_note(traceback.format_exc())
            answer = (False, error)
        try:
            data = pickle.dumps(answer)
        except Exception as error:
            problem = RuntimeError(f"the answer {answer} cannot be sent: {error!r}")
            data = pickle.dumps((False, problem))
        commands.send_bytes(data)


class Process:
    """One process that obeys. What it writes to standard error is in `errors` after its end."""

    def __init__(self, commands: Connection, stderr: int) -> None:
        self._commands = commands
        self.pid: int = commands.recv()
        # Numbers of processes are used again soon: this one stays its own, also after its end.
        self._descriptor = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._descriptor)
        self.errors = ""
        self._answers: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()
        self._stderr = threading.Thread(target=self._read_errors, args=(stderr,), daemon=True)
        self._stderr.start()

    def begin(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Have it run a function; the future has the outcome, ConnectionError if it died."""
        future: Future[Any] = Future()
        with self._lock:
            self._answers.append(future)
            # Failing here would be the tester's own mistake: pickle before anything leaves.
            self._commands.send_bytes(pickle.dumps((work, args, kwargs)))
        return future

    def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future = self.begin(work, *args, **kwargs)
        try:
            return future.result(60)
        except KeyboardInterrupt as error:
            if not future.done():
                raise
            # Raised there: here it would end the whole run of tests.
            raise AssertionError("the process was interrupted") from error
        except TimeoutError as error:
            if not future.done():
                error.add_note(self.stacks())
            raise

    def stacks(self) -> str:
        """Where the threads of the process are."""
        self.signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self.errors

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; SIGSTOP has stopped all of its threads when this returns."""
        signal.pidfd_send_signal(self._descriptor, number)
        if number is signal.SIGSTOP:
            self._wait_until_stopped()

    def _wait_until_stopped(self) -> None:
        """The kernel stops one thread after the other: those that still run go on answering."""
        threads = Path(f"/proc/{self.pid}/task")
        until = time.monotonic() + 30
        while any(state_of(thread) not in "TtZX" for thread in threads.iterdir()):
            assert time.monotonic() < until, f"process {self.pid} has not stopped within 30 s"
            time.sleep(0.001)

    def kill(self) -> None:
        """End it as the kernel ends a process that took too much memory.

        Its connections are gone a little before it is: what returns when the first are closed may
        still find the process alive.
        """
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        end = select.poll()
        end.register(self._descriptor, select.POLLIN)
        end.poll(30_000)
        self._reader.join(30)

    def end(self) -> str:
        """Let it go when it has done all; what it wrote to standard error."""
        with contextlib.suppress(OSError):
            descriptor = os.dup(self._commands.fileno())
            with socket.socket(fileno=descriptor) as channel:
                channel.shutdown(socket.SHUT_WR)
        self._reader.join(30)
        self._stderr.join(30)
        return self.errors

    def _read_answers(self) -> None:
        while True:
            try:
                ok, value = pickle.loads(self._commands.recv_bytes())
            except (EOFError, OSError):
                break
            future = self._answers.pop(0)
            if ok:
                future.set_result(value)
            else:
                future.set_exception(value)
        for future in self._answers:
            future.set_exception(ConnectionError("the process ended before it was done"))

    def _read_errors(self, stderr: int) -> None:
        with os.fdopen(stderr, errors="replace") as stream:
            for line in stream:
                self.errors += line


def state_of(thread: Path) -> str:
    """The letter that the kernel has for what a thread does; X if it is gone."""
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


class Job:
    """Workers of one job, each a process of its own."""

    def __init__(
        self,
        nursery: Nursery,
        names: tuple[str, ...],
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        """`before` is done in each process before it joins."""
        self.store = serve_store()
        self.processes = {name: nursery.start() for name in names}
        if before is not None:
            for process in self.processes.values():
                process.do(before)
        joining = [
            process.begin(join, name, rank, len(names), self.store.port, **options)
            for rank, (name, process) in enumerate(self.processes.items())
        ]
        for each in joining:
            each.result(60)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def close(self) -> None:
        """All workers shut down with grace; each has to do it in time and without a word."""
        leaving = [process.begin(rpc.shutdown) for process in self.processes.values()]
        for each in leaving:
            with contextlib.suppress(ConnectionError):
                each.result(60)
        for process in self.processes.values():
            process.end()

    def abandon(self) -> None:
        for process in self.processes.values():
            process.kill()


def serve_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client_of(port: int) -> TCPStore:
    limit = timedelta(seconds=30)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)


def join(name: str, rank: int | None, world_size: int | None, port: int, **options: Any) -> None:
    rpc.init_rpc(name, rank=rank, world_size=world_size, store=client_of(port), **options)


def init(name: str, env: dict[str, str] | None = None, **options: Any) -> None:
    """Join by what the options or the environment say."""
    os.environ.update(env or {})
    rpc.init_rpc(name, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(60) for future in futures]


def failures(futures: list[Future[Any]]) -> list[BaseException | None]:
    return [future.exception(60) for future in futures]
