"""What workers write to standard error, on its way to the terminal, the file or the pipe it is for.

The fork server must go on to watch its workers and its caller while nobody reads there: a pager
that is not scrolled, a log collector that hangs. So what cannot be written yet is kept, and written
when there is room. When much is kept, the workers are not read from any more, and wait as they
would have to if they wrote there themselves.

The descriptor is shared with other processes, so it is left as it is: it may block, or may not.
That it is ready says little, because others may fill it before we write. So a pipe or a terminal
is opened once more, by a descriptor of our own that does not block, and a socket is asked not to.
"""

from __future__ import annotations

import os
import select
import socket
import stat

_DESCRIPTOR = 2
_MUCH = 65536


def occupy_standard_streams() -> None:
    """Put nothing where a standard stream was closed. The next descriptor that is opened would get
    its number, and whatever is printed below Python would be written into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _DESCRIPTOR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class StandardError:
    """Lines that are written in the order in which they came."""

    def __init__(self, descriptor: int = _DESCRIPTOR) -> None:
        self._kept = bytearray()
        self._descriptor = _open_without_blocking(descriptor)
        is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        self._socket = socket.socket(fileno=self._descriptor) if is_socket else None

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if self._socket is not None:
            self._socket.detach()
        os.close(self._descriptor)

    def __bool__(self) -> bool:
        """Whether anything is still to be written."""
        return bool(self._kept)

    @property
    def is_behind(self) -> bool:
        return len(self._kept) >= _MUCH

    def add(self, line: str) -> None:
        self._kept += f"{line}\n".encode(errors="replace")

    def write_some(self) -> None:
        """As much as there is room for. To be called when the descriptor is ready."""
        # Whole lines where that can be: others write there, too.
        end = self._kept.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        try:
            del self._kept[: self._write(self._kept[:end])]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more
            self._kept.clear()

    def _write(self, data: bytearray) -> int:
        if self._socket is None:
            return os.write(self._descriptor, data)
        return self._socket.send(data, socket.MSG_DONTWAIT)


def _open_without_blocking(descriptor: int) -> int:
    """Another descriptor for the same, not to block if the system has a way. A file has no need:
    it never does, and opened anew it would be written from its beginning."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        for directory in ("/proc/self/fd", "/dev/fd"):
            try:
                return os.open(f"{directory}/{descriptor}", flags)
            except OSError:
                continue
    return os.dup(descriptor)
