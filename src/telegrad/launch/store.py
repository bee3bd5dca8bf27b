"""Where the processes of a local job meet: a store of torch's, on loopback."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LOOPBACK = "127.0.0.1"


def host_store(timeout: float) -> TCPStore:
    """Serve a store from this process, on a free port, for as long as the result is held."""
    # Torch by itself would listen on every interface.
    listener = socket.create_server((_LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def visit_store(port: int, timeout: float) -> TCPStore:
    """Connect to the store that the caller hosts."""
    limit = timedelta(seconds=timeout)
    return TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=limit)
