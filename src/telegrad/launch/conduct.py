"""How the processes of a local job take part in it: as RPC workers."""

from __future__ import annotations

import sys
from collections.abc import Callable

from telegrad import rpc
from telegrad.launch.job import Conduct, Seat
from telegrad.launch.store import visit_store
from telegrad.rpc.api import give_up_on_lost_workers

LEAVE_SECONDS = 90.0


def join(seat: Seat) -> None:
    store = visit_store(seat.store_port, seat.timeout)
    rpc.init_rpc(
        seat.name,
        rank=seat.rank,
        world_size=seat.world_size,
        store=store,
        key=seat.key,
        liveness=seat.liveness,
        life=seat.life,
        tensors=seat.tensors,
    )


def serve(seat: Seat) -> None:
    """A graceful shutdown ends when every worker has asked for it: when main is done."""
    rpc.shutdown()


def leave(graceful: bool) -> None:
    """A function that hangs must not keep main from returning: its worker is ended instead."""
    if not rpc.is_initialized():
        return  # The start failed, or main has left by itself.
    try:
        rpc.shutdown(graceful=graceful, timeout=LEAVE_SECONDS)
    except rpc.CallTimeout as error:
        print(f"telegrad: {error}; the workers are ended all the same", file=sys.stderr)


def on_lost(tell: Callable[[int], None]) -> None:
    rpc.on_worker_lost(lambda worker, reason: tell(worker.id))


RPC = Conduct(join, serve, leave, on_lost, give_up_on_lost_workers)
