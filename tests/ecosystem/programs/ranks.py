"""One process per rank, as the launchers of these packages start them, and one result."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(main: Callable[[int, int], Any], world_size: int) -> None:
    """Run `main(rank, world_size)` in that many processes; rank 0 says what came out.

    As torchrun does it: some packages read their rank when they are imported.
    """
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        result = main(rank, world_size)
        if rank == 0:
            report(result)
        return
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=common | {"RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(world_size)
    ]
    failed = [rank for rank, process in enumerate(ranks) if process.wait()]
    if failed:
        sys.exit(f"the ranks {failed} failed")


def report(result: Any) -> None:
    """What the program found, and on whose RPC."""
    import torch.distributed.rpc as rpc

    print("RESULT " + json.dumps({"rpc": rpc.rpc_sync.__module__, "values": result}), flush=True)
