"""A script for stock torch RPC: spawned processes, a remote module, distributed autograd.

It knows nothing of telegrad. It prints which RPC it ran on and what it computed.
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.optim import DistributedOptimizer


def parameters(rref):
    return [rpc.RRef(p) for p in rref.local_value().parameters()]


def make_module():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def train():
    module = rpc.remote("server", make_module)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, rpc.rpc_sync("server", parameters, (module,)), lr=0.1
    )
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context_id:
            output = module.rpc_sync().forward(torch.rand(8, 4))
            loss = output.pow(2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(round(loss.item(), 6))
    return losses


def worker(rank, path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", num_worker_threads=8)
    name = ["trainer", "server"][rank]
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        print("runs on", "telegrad" if "telegrad" in rpc.__file__ else "torch")
        print("losses", train())
    rpc.shutdown()


if __name__ == "__main__":
    assert sys.argv[1:], "give a file to meet in"
    mp.spawn(worker, args=(os.path.abspath(sys.argv[1]),), nprocs=2)
