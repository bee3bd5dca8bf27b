"""Optimize parameters that live on many workers."""

from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.errors import OptimizerError, StepFailed
from telegrad.optim.scaler import GradScaler

__all__ = ["DistributedOptimizer", "GradScaler", "OptimizerError", "StepFailed"]
