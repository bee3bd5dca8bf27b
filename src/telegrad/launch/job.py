"""What the three kinds of process of a local job say to each other.

The *caller* runs the user's `main`. It starts one *fork server*, which imports torch and the
user's script once and then forks the *workers*. Orders go from the caller to the fork server,
reports come back; each travels as one pickled message over a private socket pair.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from telegrad.launch.script import MainModule

MAIN_WORKER = "main"


@dataclass(frozen=True)
class Seat:
    """One worker's place in the job: all that it needs in order to join."""

    name: str
    rank: int
    world_size: int
    store_port: int
    key: bytes = field(repr=False)
    timeout: float
    liveness: float = 5.0
    life: int | None = None  # how many had this seat before; None: nobody will have it again
    tensors: str | None = None


@dataclass(frozen=True)
class Conduct:
    """What a process does once it runs. The functions must be importable by the workers.

    A worker joins and serves. The caller joins, runs main, and leaves: with grace when main
    returned, at once when it raised.
    """

    join: Callable[[Seat], None]
    serve: Callable[[Seat], None]
    leave: Callable[[bool], None]
    on_lost: Callable[[Callable[[int], None]], None] | None = None  # tells the ids of lost workers
    none_returns: Callable[[str], None] | None = None  # told why lost workers stay lost


@dataclass(frozen=True)
class Orders:
    """What the fork server is to start.

    `conduct` is pickled apart: it can be read only after `path` and `main` are in place.
    """

    seats: tuple[Seat, ...]
    conduct: bytes = field(repr=False)
    main: MainModule | None
    main_in_each: bool  # each worker runs the script, not the fork server once for all
    path: tuple[str, ...]
    argv: tuple[str, ...]
    directory: str
    threads: int
    seed: int


@dataclass(frozen=True)
class Supervise:
    """Order: from now on start a worker that ends badly anew, but each only so many times."""

    restarts: int


@dataclass(frozen=True)
class Replace:
    """Order: the others count this worker as lost. If it still runs, end it: another will come."""

    rank: int
    life: int


@dataclass(frozen=True)
class EndWorkers:
    """Order: end every worker that still runs, then yourself."""


@dataclass(frozen=True)
class Prepared:
    """Report: the script is imported, and the workers are being forked."""


@dataclass(frozen=True)
class NotStarted:
    """Report: the fork server could not prepare; no worker exists."""

    traceback: str


@dataclass(frozen=True)
class ThreadsBeforeFork:
    """Report: the script starts threads when it is imported; no worker exists.

    A fork copies only the thread that forks. What the others held locked would stay locked, so
    the script has to run in each worker.
    """


@dataclass(frozen=True)
class Ended:
    """Report: one worker is gone, and has been reaped."""

    name: str
    exit_code: int  # negative: the signal that ended it
    last_lines: tuple[str, ...]  # of its standard error
    started_anew: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    def __str__(self) -> str:
        how = describe_exit(self.exit_code)
        if not self.last_lines:
            return f"worker {self.name!r} {how}, and wrote nothing to its standard error"
        tail = "\n".join(f"    {line}" for line in self.last_lines)
        return f"worker {self.name!r} {how}; the end of its standard error:\n{tail}"


Report = Prepared | NotStarted | ThreadsBeforeFork | Ended


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was ended by signal {-code}"
    hint = " (the kernel kills so when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by signal {name}{hint}"
