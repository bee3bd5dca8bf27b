"""torch_geometric.distributed.rpc: workers find partitions, and call what others registered."""

from __future__ import annotations

import os
from typing import Any

import torch
from ranks import run_ranks


def main(rank: int, world_size: int) -> Any:
    from torch_geometric.distributed import rpc as pyg_rpc
    from torch_geometric.distributed.dist_context import DistContext, DistRole

    class Features(pyg_rpc.RPCCallBase):
        def rpc_sync(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * 10 + rank

        def rpc_async(self, rows: torch.Tensor) -> torch.Tensor:
            return self.rpc_sync(rows)

    context = DistContext(
        rank=rank,
        global_rank=rank,
        world_size=world_size,
        global_world_size=world_size,
        group_name="ecosystem",
        role=DistRole.WORKER,
    )
    pyg_rpc.init_rpc(context, "127.0.0.1", int(os.environ["MASTER_PORT"]), rpc_timeout=60.0)
    call = pyg_rpc.rpc_register(Features())
    gathered = pyg_rpc.global_all_gather({"rank": rank})
    router = pyg_rpc.RPCRouter(pyg_rpc.rpc_partition_to_workers(context, world_size, rank))
    pyg_rpc.global_barrier()
    rows = torch.arange(3)
    workers = [router.get_to_worker(partition) for partition in range(world_size)]
    later = [pyg_rpc.rpc_async(worker, call, args=(rows,)) for worker in workers]
    result = {
        "gathered": gathered,
        "workers": workers,
        "async": [future.wait().tolist() for future in later],
        "sync": [pyg_rpc.rpc_sync(worker, call, args=(rows,)).tolist() for worker in workers],
    }
    pyg_rpc.global_barrier()
    pyg_rpc.shutdown_rpc(timeout=60.0)
    return result


if __name__ == "__main__":
    run_ranks(main, 3)
