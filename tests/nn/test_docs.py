"""The examples of docs/training.md run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from telegrad import autograd, checkpoint, rpc
from telegrad.nn import RemoteModule, RemoteSequential
from telegrad.optim import DistributedOptimizer, GradScaler, StepFailed
from tests.documents import code_in, output_of, page

SCRIPT, IN_A_ROW, MIXED_PRECISION, AFTER_A_LOSS = code_in(page("training.md"))


def test_the_script_trains_and_saves(tmp_path: Path) -> None:
    output_of(SCRIPT, tmp_path, timeout=200)
    assert checkpoint.exists(tmp_path / "run" / "last")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("step", [IN_A_ROW, MIXED_PRECISION], ids=["in a row", "mixed precision"])
def test_the_step_changes_both_modules(step: str) -> None:
    encoder = RemoteModule("worker1", nn.Linear, (8, 4))
    decoder = RemoteModule("worker2", nn.Linear, (4, 1))
    names = {
        "autograd": autograd,
        "torch": torch,
        "nn": nn,
        "RemoteSequential": RemoteSequential,
        "DistributedOptimizer": DistributedOptimizer,
        "encoder": encoder,
        "decoder": decoder,
        "optimizer": DistributedOptimizer(torch.optim.SGD, [encoder, decoder], lr=0.1),
        "scaler": GradScaler(),
        "x": torch.randn(4, 8),
        "y": torch.ones(4, 1),
    }
    before = [module.state_dict()["weight"] for module in (encoder, decoder)]
    exec(step, names)
    after = [module.state_dict()["weight"] for module in (encoder, decoder)]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("workers")
def test_after_a_loss_training_is_tried_again() -> None:
    outcomes = [rpc.WorkerLost("gone"), StepFailed({}, (), undone=False), "trained"]

    def train() -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    workers = ["worker1", "worker2"]
    names = {
        "rpc": rpc,
        "autograd": autograd,
        "StepFailed": StepFailed,
        "train": train,
        "WORKERS": workers,
    }
    exec(AFTER_A_LOSS, names)
    assert names["main"]() == "trained"  # type: ignore[operator]
