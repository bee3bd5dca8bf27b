"""A step of a graph whose backward fails."""

from __future__ import annotations

import torch


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        raise ValueError("on purpose")
