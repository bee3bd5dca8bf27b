"""What an address of a store lacks, said before torch fails for it in words of its own."""

from __future__ import annotations

import os
import queue
import socket
import threading
from urllib.parse import parse_qs, urlsplit

from telegrad.rpc.errors import RendezvousError
from telegrad.wire.interrupts import may_be_interrupted

ELSEWHERE = "init_method='tcp://host:port' or 'file:///path'"
PATIENCE_WITH_NAMES = 1.0
_HIGHEST_PORT = 65535


def check_store_address(name: str, url: str, rank: int | None, world_size: int | None) -> None:
    """`RendezvousError` that names what is missing or wrong in a tcp:// or in the environment."""
    match urlsplit(url).scheme:
        case "env":
            fault = _fault_of_environment(url, rank, world_size)
        case "tcp":
            fault = _fault_of_url(url)
        case _:
            return
    if fault is not None:
        raise RendezvousError(
            f"worker {name!r} cannot open the store of init_method={url!r}: {fault}"
        )


def _fault_of_environment(url: str, rank: int | None, world_size: int | None) -> str | None:
    told = parse_qs(urlsplit(url).query)
    needed = ["MASTER_ADDR", "MASTER_PORT"]
    if rank is None and "rank" not in told and (world_size or "WORLD_SIZE" in os.environ):
        needed.append("RANK")
    missing = [variable for variable in needed if not os.environ.get(variable)]
    if missing:
        return f"set {' and '.join(missing)} in the environment, or give {ELSEWHERE}"
    numbers = {"MASTER_PORT": True, "RANK": rank is None, "WORLD_SIZE": world_size is None}
    for variable, counts in numbers.items():
        text = os.environ.get(variable)
        if counts and text and not _is_whole(text):
            return f"the variable {variable} of the environment is {text!r}: give a whole number"
    port = int(os.environ["MASTER_PORT"])
    if not 0 <= port <= _HIGHEST_PORT:
        return f"the variable MASTER_PORT is {port}: ports go from 0 to {_HIGHEST_PORT}"
    return None


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _fault_of_url(url: str) -> str | None:
    parts = urlsplit(url)
    try:
        if parts.port is None:
            return "it names no port; write 'tcp://host:port'"
    except ValueError:
        return f"its port is no number from 0 to {_HIGHEST_PORT}; write 'tcp://host:port'"
    return None if parts.hostname else "it names no host; write 'tcp://host:port'"


def host_of(url: str) -> str:
    """The host that serves a store; empty if none does."""
    parts = urlsplit(url)
    if parts.scheme == "env":
        return os.environ.get("MASTER_ADDR", "")
    return parts.hostname or "" if parts.scheme == "tcp" else ""


def is_unknown(host: str) -> bool:
    """Whether no address of a host is known. Asked after the fact: a name may become known while
    torch waits for it."""
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None)
            answer.put(False)
        except OSError:
            answer.put(True)

    if not host:
        return False
    threading.Thread(target=ask, name="telegrad-store", daemon=True).start()
    try:
        return _await_answer(answer)
    except queue.Empty:
        return False


@may_be_interrupted
def _await_answer(answer: queue.SimpleQueue[bool]) -> bool:
    return answer.get(timeout=PATIENCE_WITH_NAMES)


def unknown_host(name: str, url: str, host: str) -> str:
    where = "MASTER_ADDR names" if url.startswith("env") else "it names"
    return (
        f"worker {name!r} cannot open the store of init_method={url!r}: {where} the host {host!r}, "
        "of which no address is known here: correct it, or make the name known on this host"
    )
