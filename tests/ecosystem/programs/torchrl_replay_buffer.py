"""torchrl's RemoteTensorDictReplayBuffer: one worker keeps it, one fills it, one samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from ranks import run_ranks


def make_buffer() -> Any:
    from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    return RemoteTensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=10,
    )


def fill(buffer: Any) -> int:
    from tensordict import TensorDict
    from torchrl.data import RemoteTensorDictReplayBuffer

    for start in range(0, 40, 10):
        data = TensorDict({"observation": torch.arange(start, start + 10.0)}, [10])
        rpc.rpc_sync(buffer.owner(), RemoteTensorDictReplayBuffer.extend, args=(buffer, data))
    return buffer.rpc_sync().__len__()


def main(rank: int, world_size: int) -> Any:
    from torchrl.data import RemoteTensorDictReplayBuffer

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    result: dict[str, Any] = {}
    if rank == 0:
        buffer = rpc.remote("worker1", make_buffer)
        result["length"] = rpc.rpc_sync("worker2", fill, args=(buffer,))
        samples = [
            rpc.rpc_sync("worker1", RemoteTensorDictReplayBuffer.sample, args=(buffer,))
            for _ in range(4)
        ]
        result["samples"] = [sample["observation"].tolist() for sample in samples]
    rpc.shutdown()
    return result


if __name__ == "__main__":
    run_ranks(main, 3)
