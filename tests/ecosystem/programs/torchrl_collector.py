"""torchrl's RPCCollector: frames from two remote collectors, with the weights of a local policy."""

from __future__ import annotations

import torch
from ranks import free_port, report


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor([0.7]))

    def forward(self, th: torch.Tensor) -> torch.Tensor:
        return self.gain * th.unsqueeze(-1)


def main() -> None:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import RPCCollector
    from torchrl.envs import EnvCreator
    from torchrl.envs.custom import PendulumEnv

    torch.manual_seed(0)
    policy = TensorDictModule(Policy(), in_keys=["th"], out_keys=["action"])
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
        expected = policy.module(th)
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
