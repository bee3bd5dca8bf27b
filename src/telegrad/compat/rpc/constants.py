"""Stands for `torch.distributed.rpc.constants`."""

from telegrad.compat import stock

DEFAULT_RPC_TIMEOUT_SEC: float = stock.constants.DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = stock.constants.DEFAULT_INIT_METHOD
DEFAULT_SHUTDOWN_TIMEOUT: float = stock.constants.DEFAULT_SHUTDOWN_TIMEOUT
DEFAULT_NUM_WORKER_THREADS: int = stock.constants.DEFAULT_NUM_WORKER_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT = stock.constants.DEFAULT_PROCESS_GROUP_TIMEOUT
UNSET_RPC_TIMEOUT: float = stock.constants.UNSET_RPC_TIMEOUT

__all__: list[str] = []
