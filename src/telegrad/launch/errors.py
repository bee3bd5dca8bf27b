"""What can go wrong while workers start."""

from telegrad.rpc.errors import TelegradError


class LaunchError(TelegradError):
    """The workers of a job could not be started, or one of them ended before the job began."""
