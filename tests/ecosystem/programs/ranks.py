"""One process per rank, as the launchers of these packages start them, and one result."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(main: Callable[[int, int], Any], world_size: int) -> None:
    """Run `main(rank, world_size)` in that many processes; rank 0 says what came out."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    mp.start_processes(_rank, (main, world_size), world_size, start_method="spawn")


def _rank(rank: int, main: Callable[[int, int], Any], world_size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    result = main(rank, world_size)
    if rank == 0:
        report(result)


def report(result: Any) -> None:
    """What the program found, and on whose RPC."""
    import torch.distributed.rpc as rpc

    print("RESULT " + json.dumps({"rpc": rpc.rpc_sync.__module__, "values": result}), flush=True)
