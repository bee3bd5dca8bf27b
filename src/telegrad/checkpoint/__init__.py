"""Save and load the modules and optimizers of a whole job."""

from telegrad.checkpoint.errors import CheckpointError
from telegrad.checkpoint.loading import load
from telegrad.checkpoint.saving import save

__all__ = ["CheckpointError", "load", "save"]
