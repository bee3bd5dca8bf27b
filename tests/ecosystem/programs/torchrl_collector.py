"""torchrl's RPCCollector: frames from two remote collectors, with the weights of a local policy."""

from __future__ import annotations

import torch
from ranks import free_port, report


def main() -> None:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import RPCCollector
    from torchrl.envs import EnvCreator
    from torchrl.envs.custom import PendulumEnv

    torch.manual_seed(0)
    policy = TensorDictModule(
        torch.nn.Linear(1, 1, bias=False), in_keys=["th"], out_keys=["action"]
    )
    make_env = EnvCreator(PendulumEnv)
    collector = RPCCollector(
        [make_env, make_env],
        policy,
        frames_per_batch=40,
        total_frames=120,
        sync=True,
        launcher="mp",
        tcp_port=str(free_port()),
    )
    batches = []
    for batch in collector:
        action, th = batch["action"], batch["th"]
        expected = torch.nn.functional.linear(th.unsqueeze(-1), policy.module.weight)
        batches.append(
            {
                "shape": list(batch.shape),
                "keys": sorted(map(str, batch.keys())),
                "actions follow the policy": bool(
                    torch.allclose(action.flatten(), expected.flatten(), atol=1e-5)
                ),
            }
        )
    collector.shutdown()
    report(batches)


if __name__ == "__main__":
    main()
