"""Where the processes of a local job meet: a store of torch's, on loopback."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from telegrad.launch.errors import LaunchError

_LOOPBACK = "127.0.0.1"


def host_store(timeout: float) -> TCPStore:
    """Serve a store from this process, on a free port, for as long as the result is held."""
    # Torch by itself would listen on every interface.
    listener = socket.create_server((_LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return _open_store(port, timeout, is_master=True, master_listen_fd=listener.detach())


def visit_store(port: int, timeout: float) -> TCPStore:
    """Connect to the store that the caller hosts."""
    return _open_store(port, timeout, is_master=False)


def _open_store(port: int, timeout: float, **how: Any) -> TCPStore:
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(_LOOPBACK, port, wait_for_workers=False, timeout=limit, **how)
    except DistError as error:
        # The rest of what torch says is a stack of C++.
        reason = str(error).partition("\n")[0]
        raise LaunchError(
            f"the store in which the workers meet could not be reached within {timeout:g} s "
            f"({reason}): pass a longer timeout= to telegrad.run"
        ) from None
