"""What torch imports when an optimizer or a checkpoint is first used: seconds that forks save."""

import torch

import telegrad.checkpoint  # noqa: F401

torch.optim.SGD([torch.zeros(1)], lr=0.1)
