"""How the processes of a local job take part in it: as RPC workers."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from telegrad import rpc
from telegrad.launch.job import Conduct, Seat

WORKERS_VARIABLE = "TELEGRAD_WORKERS"


def join(seat: Seat) -> None:
    store = TCPStore(
        "127.0.0.1",
        seat.store_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seat.timeout),
    )
    rpc.init_rpc(
        seat.name, rank=seat.rank, world_size=seat.world_size, store=store, key=seat.key
    )


def serve(seat: Seat) -> None:
    """A graceful shutdown ends when every worker has asked for it: when main is done."""
    rpc.shutdown()


def leave(graceful: bool) -> None:
    rpc.shutdown(graceful=graceful)


RPC = Conduct(join=join, serve=serve, leave=leave)
