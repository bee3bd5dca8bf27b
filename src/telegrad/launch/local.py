"""`telegrad.run`: a job on this machine, from one script.

`main` runs in the process that calls, as worker "main" with rank 0. The other workers are forked
from a server that has imported torch once (forkserver.py) and serve calls until main returns.

What must never happen: a process that stays behind. Workers end when main does, whatever way it
ends: returned, raised, interrupted, or killed. In the last case nobody here can act any more, so
the workers watch for it themselves (lifeline.py).

Joining waits inside torch's store, which no signal interrupts. So it is done by a thread, while
the calling thread waits where Ctrl-C and the death of a worker can reach it. When the wait is
given up the store goes away, and with it the thread's reason to wait.

An interrupt comes through in waits only (`wire/interrupts.py`), so that neither starting nor ending
a job is left half done, however often Ctrl-C is pressed.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from telegrad.launch.conduct import RPC, WORKERS_VARIABLE
from telegrad.launch.errors import LaunchError
from telegrad.launch.job import MAIN_WORKER, Conduct, Orders, Seat
from telegrad.launch.processes import LocalProcesses
from telegrad.launch.script import find_main, is_installing
from telegrad.launch.store import host_store
from telegrad.launch.worker import seed_everything
from telegrad.rpc.api import is_initialized
from telegrad.rpc.arguments import check_seconds, check_whole
from telegrad.rpc.room import room_to
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire import interrupts
from telegrad.wire.at_exit import leave_threads_behind
from telegrad.wire.group import check_backend

T = TypeVar("T")

_LEAVE_SECONDS = 5.0
_NEEDED_TO_START = 16
# None once this process has joined, or why the job cannot begin.
_News: TypeAlias = "queue.SimpleQueue[BaseException | None]"


def run(
    main: Callable[[], T],
    workers: int | Sequence[str] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    threads_per_worker: int = 1,
    seed: int | None = None,
    timeout: float = 60.0,
    restarts: int = 0,
    liveness: float = 5.0,
    tensors: str | None = None,
) -> T:
    """Start workers on this machine, run `main()` here beside them, and return its result.

    This process is the worker "main" with rank 0. `workers` says which others there are: a
    number (they are called worker1, worker2, ...) or their names. Without it the number comes
    from `telegrad run SCRIPT --workers N`.

    An error in main ends the workers at once and is raised here, as is Ctrl-C. A worker that
    ends before all have joined, or a start that takes longer than `timeout` seconds, is a
    `LaunchError`. A worker that is lost later is seen by the calls that need it.

    With `restarts` a worker that dies while main runs is started anew, up to so many times each:
    empty, under its old name and rank. What depended on the dead one fails with `WorkerLost`; calls
    by name or rank reach the new one as soon as it is there (`telegrad.rpc.wait_for_worker`).

    `liveness` is how many seconds a stopped worker, or a broken connection, may take to come back
    before the worker counts as lost.

    With `tensors="gloo"` large tensors travel by process groups of torch.distributed instead of
    shared memory, as they would between hosts.

    `env` is added to the environment of the workers. `seed` makes random numbers repeatable:
    the worker with rank r starts from seed + r; without it every worker starts anew.

    Call it under `if __name__ == "__main__":`, because workers import the script.
    """
    names = worker_names(workers)
    if is_initialized():
        raise LaunchError(
            "this process is a worker of a job already: call telegrad.run when that job has ended "
            "(telegrad.rpc.shutdown), or from another process"
        )
    asked = os.environ.get(WORKERS_VARIABLE)
    if workers is not None and asked is not None and asked != str(len(names)):
        warnings.warn(
            f"`telegrad run` was given {asked} workers, but the script says workers={workers!r}: "
            f"there are {len(names)}. Leave workers= out to let the command decide.",
            stacklevel=2,
        )
    return run_with(
        RPC,
        main,
        names,
        env=env or {},
        threads=threads_per_worker,
        seed=seed,
        timeout=timeout,
        restarts=restarts,
        liveness=liveness,
        tensors=tensors,
    )


def worker_names(workers: int | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the workers besides main."""
    if workers is None:
        workers = _number_from_environment()
    if isinstance(workers, bool) or not isinstance(workers, int | Iterable):
        raise TypeError(
            f"workers={workers!r} is a {type(workers).__name__}: give a number or a list of names"
        )
    if isinstance(workers, int):
        if workers < 0:
            raise ValueError(f"workers={workers}: give the number of workers, 0 or more")
        return tuple(f"worker{number}" for number in range(1, workers + 1))
    if isinstance(workers, str):
        raise TypeError(f"workers={workers!r} is one string: give a number or a list of names")
    names = tuple(workers)
    for rank, name in enumerate(names, 1):
        WorkerInfo(name, rank)
        if name == MAIN_WORKER or names.count(name) > 1:
            raise ValueError(
                f"the worker name {name!r} is given twice: each worker needs a name of its own, "
                f"and {MAIN_WORKER!r} is the process that calls run"
            )
    return names


def _number_from_environment() -> int:
    text = os.environ.get(WORKERS_VARIABLE)
    if text is None:
        raise ValueError(
            "the number of workers is not known: pass workers= to telegrad.run, or start the "
            "script with `telegrad run SCRIPT --workers N`"
        )
    if not text.isdecimal():
        raise ValueError(f"{WORKERS_VARIABLE}={text!r} is not a number of workers")
    return int(text)


def run_with(
    conduct: Conduct,
    main: Callable[[], T],
    names: tuple[str, ...],
    *,
    env: Mapping[str, str],
    threads: int,
    seed: int | None,
    timeout: float,
    restarts: int = 0,
    liveness: float = 5.0,
    tensors: str | None = None,
) -> T:
    """Run a job whose processes join, serve and leave as `conduct` says."""
    if is_installing():
        raise LaunchError(
            "telegrad.run was called while a worker imports the script: put the call under "
            '`if __name__ == "__main__":`'
        )
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise ValueError(
            f"restarts={restarts!r}: give how often a worker may start anew, 0 or more"
        )
    _check(main, env, threads, seed, timeout, liveness)
    if tensors is not None:
        check_backend(tensors)
    interrupts.install("launch")
    try:
        return _run(conduct, main, names, env, threads, seed, timeout, restarts, liveness, tensors)
    finally:
        interrupts.uninstall("launch")


def _run(
    conduct: Conduct,
    main: Callable[[], T],
    names: tuple[str, ...],
    env: Mapping[str, str],
    threads: int,
    seed: int | None,
    timeout: float,
    restarts: int,
    liveness: float,
    tensors: str | None,
) -> T:
    life = 0 if restarts else None
    what = f"start a job of {len(names) + 1} processes"
    with room_to(what, _NEEDED_TO_START):
        store = host_store(timeout)
    key = secrets.token_bytes(32)
    seats = [
        Seat(name, rank, len(names) + 1, store.port, key, timeout, liveness, life, tensors)
        for rank, name in enumerate((MAIN_WORKER, *names))
    ]
    if seed is not None:
        seed_everything(seed)
    orders = _orders(conduct, tuple(seats[1:]), threads, seed)
    news: _News = queue.SimpleQueue()
    with room_to(what):
        processes = LocalProcesses(orders, env, lambda why: news.put(LaunchError(why)))
    joining = threading.Thread(
        target=_join, args=(conduct, seats[0], news), name="telegrad-join", daemon=True
    )
    joining.start()
    try:
        _wait_for_start(news, len(names), timeout)
        if restarts:
            processes.supervise(restarts)
            if conduct.on_lost is not None:
                size = len(seats)
                conduct.on_lost(lambda worker: processes.replace(worker % size, worker // size))
        result = _call(main)
        if restarts:
            processes.supervise(0)
        conduct.leave(True)
        processes.wait(_LEAVE_SECONDS)
    except BaseException as error:
        try:
            processes.end()
        finally:
            del store
            _await_end_of(joining)
            _leave_at_once(conduct, error)
        if not isinstance(error, LaunchError):
            for ended in processes.failures():
                error.add_note(str(ended))
        raise
    processes.end()
    return result


def _check(
    main: object, env: object, threads: int, seed: int | None, timeout: float, liveness: float
) -> None:
    if not callable(main):
        raise TypeError(f"main={main!r} cannot be called: give the function that is to run here")
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a {type(env).__name__}: give a dict of names and values")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env={{{name!r}: {value!r}}}: give names and values as strings")
    check_whole("threads_per_worker", threads, least=1)
    if seed is not None:
        check_whole("seed", seed)
    check_seconds("timeout", timeout)
    check_seconds("liveness", liveness)


def _orders(conduct: Conduct, seats: tuple[Seat, ...], threads: int, seed: int | None) -> Orders:
    return Orders(
        seats=seats,
        conduct=pickle.dumps(conduct),
        main=find_main(),
        main_in_each=False,
        path=tuple(sys.path),
        argv=tuple(sys.argv),
        directory=os.getcwd(),
        threads=threads,
        seed=secrets.randbits(48) if seed is None else seed,
    )


def _join(conduct: Conduct, seat: Seat, news: _News) -> None:
    try:
        conduct.join(seat)
    except BaseException as error:
        news.put(error)
    else:
        news.put(None)


@interrupts.may_be_interrupted
def _wait_for_start(news: _News, workers: int, timeout: float) -> None:
    try:
        problem = news.get(timeout=timeout)
    except queue.Empty:
        raise LaunchError(
            f"the {workers} workers did not all join within {timeout:g} s: "
            "pass a longer timeout= to telegrad.run, or start fewer"
        ) from None
    if problem is not None:
        raise problem


@interrupts.may_be_interrupted
def _call(main: Callable[[], T]) -> T:
    """What `main` does is the program's, also where no frame says so: it may be of a library."""
    return main()


def _await_end_of(joining: threading.Thread) -> None:
    """A thread that still waits in C++ when the interpreter ends would abort the process."""
    joining.join(_LEAVE_SECONDS)
    if joining.is_alive():
        atexit.register(leave_threads_behind)


def _leave_at_once(conduct: Conduct, error: BaseException) -> None:
    try:
        conduct.leave(False)
    except Exception as second:
        error.add_note(f"and this worker could not leave the job: {second!r}")
