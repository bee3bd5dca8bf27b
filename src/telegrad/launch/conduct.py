"""How the processes of a local job take part in it: as RPC workers."""

from __future__ import annotations

from telegrad import rpc
from telegrad.launch.job import Conduct, Seat
from telegrad.launch.store import visit_store

WORKERS_VARIABLE = "TELEGRAD_WORKERS"


def join(seat: Seat) -> None:
    store = visit_store(seat.store_port, seat.timeout)
    rpc.init_rpc(
        seat.name,
        rank=seat.rank,
        world_size=seat.world_size,
        store=store,
        key=seat.key,
        life=seat.life,
    )


def serve(seat: Seat) -> None:
    """A graceful shutdown ends when every worker has asked for it: when main is done."""
    rpc.shutdown()


def leave(graceful: bool) -> None:
    rpc.shutdown(graceful=graceful)


RPC = Conduct(join=join, serve=serve, leave=leave)
