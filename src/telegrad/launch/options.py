"""What is said of a job before it starts: who is in it, and how its workers are to be started.

All of it is looked at here, so that nothing has to be taken back because of it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from telegrad.launch.job import MAIN_WORKER
from telegrad.rpc.arguments import check_seconds, check_whole
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.group import check_backend

WORKERS_VARIABLE = "TELEGRAD_WORKERS"
_LEAST_SEED, _GREATEST_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True)
class Options:
    """The options of `telegrad.run`, which says what each is for."""

    names: tuple[str, ...]
    """Of the workers besides main."""
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    seed: int | None = None
    timeout: float = 60.0
    restarts: int = 0
    liveness: float = 5.0
    tensors: str | None = None

    def __post_init__(self) -> None:
        _check_restarts(self.restarts)
        _check_environment(self.env)
        check_whole("threads_per_worker", self.threads, least=1)
        if self.seed is not None:
            _check_seed(self.seed, self.world_size)
        check_seconds("timeout", self.timeout)
        check_seconds("liveness", self.liveness)
        if self.tensors is not None:
            check_backend(self.tensors)

    @property
    def world_size(self) -> int:
        return len(self.names) + 1


def _check_restarts(restarts: object) -> None:
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise ValueError(
            f"restarts={restarts!r}: give how often a worker may start anew, 0 or more"
        )


def _check_seed(seed: object, world_size: int) -> None:
    check_whole("seed", seed)
    assert isinstance(seed, int)
    if not _LEAST_SEED <= seed <= _GREATEST_SEED - (world_size - 1):
        raise ValueError(
            f"seed={seed}: torch takes seeds from -2**63 to 2**64 - 1, and each of the "
            f"{world_size} processes has one of its own, the last seed + {world_size - 1}"
        )


def _check_environment(env: object) -> None:
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a {type(env).__name__}: give a dict of names and values")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env={{{name!r}: {value!r}}}: give names and values as strings")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(
                f"env has {name!r}, which cannot be a variable of the environment: its name must "
                "not be empty or hold '=', and neither name nor value may hold a null character"
            )


def worker_names(workers: int | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the workers besides main."""
    if workers is None:
        workers = _number_from_environment()
    count = _whole_number(workers)
    if count is not None:
        if count < 0:
            raise ValueError(f"workers={count}: give the number of workers, 0 or more")
        return tuple(f"worker{number}" for number in range(1, count + 1))
    if isinstance(workers, bool) or not isinstance(workers, Iterable):
        raise TypeError(
            f"workers={workers!r} is a {type(workers).__name__}: give a number or a list of names"
        )
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


def _whole_number(value: object) -> int | None:
    """Also one of numpy or torch."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


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
