"""What this process lacks itself: descriptors, or memory for another connection.

Such a lack says nothing about the worker that was to be reached, and may be over in a moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from telegrad.rpc.errors import NoRoom

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_lack(error: BaseException | None) -> bool:
    """Whether an error, or the one that it came from, is about this process alone."""
    return _lack_in(error) is not None


def _lack_in(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def no_room(what: str, error: BaseException) -> NoRoom:
    return NoRoom(f"this process cannot {what} ({error}): {_advice(_lack_in(error))}")


def _advice(lack: int | None) -> str:
    """What there is too little of, and what to do."""
    match lack:
        case errno.ENOMEM:
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            if limit == resource.RLIM_INFINITY:
                return (
                    "the system has no memory for it. Use less, run fewer processes here, or raise "
                    "the limit of its container"
                )
            return (
                f"the system has no memory for it, or it has used up the {limit >> 20} MB of "
                "addresses that it may have. Use less memory, or raise that limit (ulimit -v)"
            )
        case errno.ENOBUFS:
            return (
                "the system has no buffers for another socket. Close connections, or let the "
                "system have more memory for them (sysctl net.ipv4.tcp_mem)"
            )
        case errno.ENFILE:
            return (
                "all processes of the system together have as many files open as they may. Close "
                "files, or raise that limit (sysctl fs.file-max)"
            )
        case _:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"it may have {limit} descriptors open. Raise that limit (ulimit -n), or close "
                "files"
            )


def lack_of(descriptors: int) -> OSError | None:
    """Why this process cannot open so many more, if that is so."""
    opened: list[int] = []
    try:
        opened += [os.open(os.devnull, os.O_RDONLY)]
        for _ in range(descriptors - 1):
            opened.append(os.dup(opened[0]))
    except OSError as error:
        return error
    finally:
        for each in opened:
            os.close(each)
    return None


@contextlib.contextmanager
def room_to(what: str, descriptors: int = 0) -> Iterator[None]:
    """Have a lack of room told in words. So many descriptors are needed at the least: libraries
    that find none tell it in their own."""
    try:
        lack = lack_of(descriptors or 1)
        if lack is not None:
            raise lack
        yield
    except OSError as error:
        if not is_lack(error):
            raise
        raise no_room(what, error) from error
