"""Save and load the modules and optimizers of a whole job."""

from telegrad.checkpoint.errors import CheckpointError
from telegrad.checkpoint.loading import exists, load
from telegrad.checkpoint.saving import save

__all__ = ["CheckpointError", "exists", "load", "save"]
