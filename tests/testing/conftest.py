"""Real processes, as the tests of rpc have them."""

from tests.rpc.conftest import nursery, workers

__all__ = ["nursery", "workers"]
