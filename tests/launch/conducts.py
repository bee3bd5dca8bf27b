"""Processes that meet in torch's store and make no calls: the launcher without RPC."""

from __future__ import annotations

import json
import os
import random
import signal

import numpy
import torch
from torch.distributed import TCPStore

from telegrad.launch.job import Conduct, Seat
from telegrad.launch.store import visit_store

_stores: dict[str, TCPStore] = {}
_keys: dict[str, bytes] = {}


def key_of_main() -> bytes:
    return _keys["main"]


def join(seat: Seat) -> None:
    store = visit_store(seat.store_port, seat.timeout)
    _stores[seat.name] = store
    _keys[seat.name] = seat.key
    facts = {
        "name": seat.name,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "random": [random.random(), float(numpy.random.rand()), float(torch.rand(()))],
        "environment": os.environ.get("TELEGRAD_TEST"),
    }
    store.set(str(seat.rank), json.dumps(facts))
    store.wait([str(rank) for rank in range(seat.world_size)])


def serve(seat: Seat) -> None:
    _stores[seat.name].wait(["done"])


def leave(graceful: bool) -> None:
    if graceful:
        _stores["main"].set("done", "")


def facts(rank: int) -> dict[str, object]:
    """What the worker with this rank said of itself when it joined."""
    return json.loads(_stores["main"].get(str(rank)))


def compute_then_join(seat: Seat) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    (x @ x).sum().backward()
    join(seat)


def raise_in_worker2(seat: Seat) -> None:
    if seat.name == "worker2":
        raise ValueError("no such data set")
    join(seat)


def abort_in_worker2(seat: Seat) -> None:
    if seat.name == "worker2":
        os.abort()
    join(seat)


def never_join(seat: Seat) -> None:
    if seat.name == "main":
        join(seat)
    else:
        while True:
            os.read(os.pipe()[0], 1)


def ignore_end_then_join(seat: Seat) -> None:
    if seat.name != "main":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    join(seat)


STORE = Conduct(join, serve, leave)
COMPUTING = Conduct(compute_then_join, serve, leave)
RAISING = Conduct(raise_in_worker2, serve, leave)
ABORTING = Conduct(abort_in_worker2, serve, leave)
ABSENT = Conduct(never_join, serve, leave)
STUBBORN = Conduct(ignore_end_then_join, serve, leave)
