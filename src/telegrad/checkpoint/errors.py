"""What checkpoints have to say when something is wrong."""

from __future__ import annotations

from telegrad.rpc.errors import TelegradError


class CheckpointError(TelegradError):
    """A checkpoint that cannot be written or read."""
