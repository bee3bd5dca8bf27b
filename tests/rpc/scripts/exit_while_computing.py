"""End with a given exit code while threads of the job compute and do not stop."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any

import torch
from torch.distributed import HashStore

from telegrad import rpc

started = threading.Semaphore(0)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient @ gradient


def multiply_for_ever() -> None:
    x = torch.zeros(500, 500)
    started.release()
    while True:
        torch.mm(x, x)


def differentiate_for_ever() -> None:
    x = torch.zeros(200, 200, requires_grad=True)
    started.release()
    while True:
        y = x
        for _ in range(10):
            y = Identity.apply(y)
        y.backward(torch.zeros(200, 200))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rpc.init_rpc("alone", rank=0, world_size=1, store=HashStore())
    endless = (multiply_for_ever, differentiate_for_ever)
    futures = [rpc.rpc_async("alone", function, timeout=0) for function in endless * 2]
    for _ in futures:
        started.acquire()
    rpc.shutdown(graceful=False)
    print("left")
    atexit.register(print, "last word")
    sys.exit(int(sys.argv[1]))
