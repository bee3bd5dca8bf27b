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
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from telegrad.launch.conduct import RPC
from telegrad.launch.errors import LaunchError
from telegrad.launch.job import MAIN_WORKER, Conduct, Orders, Seat
from telegrad.launch.options import WORKERS_VARIABLE, Options, worker_names
from telegrad.launch.processes import LocalProcesses
from telegrad.launch.script import find_main, is_installing
from telegrad.launch.store import host_store
from telegrad.launch.streams import occupy_standard_streams
from telegrad.launch.worker import seed_everything
from telegrad.rpc.api import is_initialized
from telegrad.rpc.room import room_to
from telegrad.wire import interrupts
from telegrad.wire.at_exit import leave_threads_behind

T = TypeVar("T")

_under_way = threading.Lock()


def _forget_run_of_parent() -> None:
    global _under_way
    _under_way = threading.Lock()


os.register_at_fork(after_in_child=_forget_run_of_parent)

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
    if is_initialized() and not _under_way.locked():
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
    options = Options(
        names, env or {}, threads_per_worker, seed, timeout, restarts, liveness, tensors
    )
    return run_with(RPC, main, options)


def run_with(conduct: Conduct, main: Callable[[], T], options: Options) -> T:
    """Run a job whose processes join, serve and leave as `conduct` says."""
    if is_installing():
        raise LaunchError(
            "telegrad.run was called while a worker imports the script: put the call under "
            '`if __name__ == "__main__":`'
        )
    if not callable(main):
        raise TypeError(f"main={main!r} cannot be called: give the function that is to run here")
    under_way = _under_way  # A process that main forks has another.
    if not under_way.acquire(blocking=False):
        raise LaunchError(
            "this process is a worker of a job already, or is about to be: a telegrad.run is under "
            "way in it. Call telegrad.run when that one has returned, or from another process"
        )
    interrupts.install("launch")
    try:
        return _run(conduct, main, options)
    finally:
        interrupts.uninstall("launch")
        under_way.release()


def _run(conduct: Conduct, main: Callable[[], T], options: Options) -> T:
    what = f"start a job of {options.world_size} processes"
    with room_to(what, _NEEDED_TO_START):
        occupy_standard_streams()
        store = host_store(options.timeout)
    own, *others = _seats(options, store.port)
    if options.seed is not None:
        seed_everything(options.seed)
    orders = _orders(conduct, tuple(others), options)
    news: _News = queue.SimpleQueue()
    joining = threading.Thread(
        target=_join, args=(conduct, own, news), name="telegrad-join", daemon=True
    )

    def begin_to_join() -> None:
        # Not sooner: who waits in the store when a start fails is told by torch, at length.
        try:
            joining.start()
        except RuntimeError as error:
            news.put(error)

    def workers_stay_lost(why: str) -> None:
        news.put(LaunchError(why))
        if conduct.none_returns is not None:
            conduct.none_returns(why)

    with room_to(what):
        processes = LocalProcesses(
            orders,
            options.env,
            begin_to_join,
            lambda why: news.put(LaunchError(why)),
            workers_stay_lost,
        )
    try:
        _wait_for_start(news, len(others), options.timeout)
        if options.restarts:
            processes.supervise(options.restarts)
            if conduct.on_lost is not None:
                size = options.world_size
                conduct.on_lost(lambda worker: processes.replace(worker % size, worker // size))
        result = _call(main)
        if processes.are_of_parent:
            return result
        if options.restarts:
            processes.supervise(0)
        conduct.leave(True)
        processes.wait(_LEAVE_SECONDS)
    except BaseException as error:
        if processes.are_of_parent:
            raise
        try:
            processes.end()
        finally:
            del store
            _await_end_of(joining)
            _leave_at_once(conduct, error)
        if not isinstance(error, LaunchError):
            for why in processes.failures():
                error.add_note(why)
        raise
    processes.end()
    return result


def _seats(options: Options, port: int) -> list[Seat]:
    """The place of each process, main's first."""
    key = secrets.token_bytes(32)
    return [
        Seat(
            name=name,
            rank=rank,
            world_size=options.world_size,
            store_port=port,
            key=key,
            timeout=options.timeout,
            liveness=options.liveness,
            life=0 if options.restarts else None,
            tensors=options.tensors,
        )
        for rank, name in enumerate((MAIN_WORKER, *options.names))
    ]


def _orders(conduct: Conduct, seats: tuple[Seat, ...], options: Options) -> Orders:
    return Orders(
        seats=seats,
        conduct=pickle.dumps(conduct),
        main=find_main(),
        main_in_each=False,
        # Anything else is passed over by Python's imports, too.
        path=tuple(str(entry) for entry in sys.path if isinstance(entry, str)),
        argv=tuple(sys.argv),
        directory=os.getcwd(),
        threads=options.threads,
        seed=secrets.randbits(48) if options.seed is None else options.seed,
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
        try:
            raise problem
        finally:
            # Its traceback knows this frame: without this the two would keep each other.
            del problem


@interrupts.may_be_interrupted
def _call(main: Callable[[], T]) -> T:
    """What `main` does is the program's, also where no frame says so: it may be of a library."""
    return main()


def _await_end_of(joining: threading.Thread) -> None:
    """A thread that still waits in C++ when the interpreter ends would abort the process."""
    if joining.ident is None:
        return  # There was no thread for it.
    joining.join(_LEAVE_SECONDS)
    if joining.is_alive():
        atexit.register(leave_threads_behind)


def _leave_at_once(conduct: Conduct, error: BaseException) -> None:
    try:
        conduct.leave(False)
    except Exception as second:
        error.add_note(f"and this worker could not leave the job: {second!r}")
