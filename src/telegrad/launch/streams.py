"""What workers write to standard error, on its way to the terminal, the file or the pipe it is for.

The fork server must go on to watch its workers and its caller while nobody reads there: a pager
that is not scrolled, a log collector that hangs. So what cannot be written yet is kept, and written
when there is room. When much is kept, the workers are not read from any more, and wait as they
would have to if they wrote there themselves.

The descriptor is shared with other processes, so it is left as it is: it may block, or may not. One
that is ready takes up to `PIPE_BUF` bytes without blocking.
"""

from __future__ import annotations

import os
import select

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

    def __init__(self) -> None:
        self._kept = bytearray()

    def fileno(self) -> int:
        return _DESCRIPTOR

    def __bool__(self) -> bool:
        """Whether anything is still to be written."""
        return bool(self._kept)

    @property
    def is_behind(self) -> bool:
        return len(self._kept) >= _MUCH

    def add(self, line: str) -> None:
        self._kept += f"{line}\n".encode(errors="replace")

    def write_some(self) -> None:
        """To be called when the descriptor is ready."""
        # Whole lines where that can be: others write there, too.
        end = self._kept.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        try:
            del self._kept[: os.write(_DESCRIPTOR, self._kept[:end])]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more
            self._kept.clear()
