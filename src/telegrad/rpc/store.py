"""Opening the store in which the workers of a job meet.

Torch opens a store in C++, where no signal arrives, and does not always keep to the time that it
was given: it waits without end for the answer of a port at which something else listens. So a
thread opens the store, and the one that calls waits for it no longer than it was told to. A thread
that is left behind in that way is a daemon, and waits for as long as that port does not answer.

Against a file that is no store that does not help: torch looks in it for an entry that never ends,
with the interpreter's lock in its hand. So we look at a file before torch does.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from telegrad.rpc.errors import RendezvousError
from telegrad.rpc.store_address import check_store_address, host_of, is_unknown, unknown_host
from telegrad.rpc.store_file import check_store_file
from telegrad.wire.interrupts import may_be_interrupted

# Where torch does keep to its time it knows better than we do why it was not enough.
_PATIENCE_WITH_TORCH = 0.5
_Outcome: TypeAlias = "queue.SimpleQueue[tuple[Store, int, int] | Exception]"


def open_store(
    name: str, init_method: str | None, rank: int | None, world_size: int | None, timeout: float
) -> tuple[Store, int | None, int | None]:
    """The store that an address names, with the rank and world size that the address may know."""
    url = init_method or "env://"
    if urlsplit(url).scheme == "file":
        check_store_file(url, Path(urlsplit(url).path), timeout)
    check_store_address(name, url, rank, world_size)
    outcome: _Outcome = queue.SimpleQueue()

    def open_in_thread() -> None:
        try:
            outcome.put(_open(url, rank, world_size, timeout))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=open_in_thread, name="telegrad-store", daemon=True).start()
    found: tuple[Store, int, int] | Exception | None
    try:
        found = _await_outcome(outcome, timeout + _PATIENCE_WITH_TORCH)
    except queue.Empty:
        found = None
    if (found is None or isinstance(found, Exception)) and is_unknown(host_of(url)):
        raise RendezvousError(unknown_host(name, url, host_of(url)))
    if found is None:
        raise RendezvousError(
            f"worker {name!r} waited {timeout:g} s for the store of init_method={url!r}, which did "
            "not answer: is rank 0 running, and is it what listens there?"
        )
    if isinstance(found, Exception):
        raise RendezvousError(
            f"worker {name!r} cannot open the store of init_method={url!r}: {_advice(url, found)} "
            f"({_first_line(found)})"
        ) from None
    store, found_rank, found_size = found
    return (
        store,
        found_rank if found_rank >= 0 else None,
        found_size if found_size > 0 else None,
    )


@may_be_interrupted
def _await_outcome(outcome: _Outcome, seconds: float) -> tuple[Store, int, int] | Exception:
    return outcome.get(timeout=min(seconds, threading.TIMEOUT_MAX))


def _open(
    url: str, rank: int | None, world_size: int | None, timeout: float
) -> tuple[Store, int, int]:
    limit = timedelta(seconds=timeout)
    given = {"rank": -1 if rank is None else rank}
    if world_size is not None:
        given["world_size"] = world_size
    elif not url.startswith("env://") or "WORLD_SIZE" not in os.environ:
        if rank is None and url.startswith("env://") and "RANK" in os.environ:
            given["rank"] = int(os.environ["RANK"])
        separator = "&" if "?" in url else "?"
        url = f"{url}{separator}world_size=-1&rank={given.pop('rank')}"
    store, found_rank, found_size = next(iter(rendezvous(url, timeout=limit, **given)))
    store.set_timeout(limit)
    return store, found_rank, found_size


def _advice(url: str, error: Exception) -> str:
    match urlsplit(url).scheme:
        case "env" | "tcp" if _is_taken(error):
            where = "MASTER_PORT" if url.startswith("env") else "that port"
            return f"something else listens at {where}; give all workers another"
        case "env" | "tcp":
            return "are all workers running, with the same address and world_size?"
        case "file":
            return "may this user read and write the file?"
    return "give 'env://', 'tcp://host:port' or 'file:///path'"


def _is_taken(error: Exception) -> bool:
    return os.strerror(errno.EADDRINUSE) in str(error) or "EADDRINUSE" in str(error)


def _first_line(error: Exception) -> str:
    """Torch adds the stack of its C++ to what it has to say."""
    return str(error).partition("\n")[0]
