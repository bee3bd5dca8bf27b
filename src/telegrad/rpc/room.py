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
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_room(what: str, error: BaseException) -> NoRoom:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return NoRoom(
        f"this process cannot {what} ({error}): it may have {limit} descriptors open. Raise that "
        "limit (ulimit -n), or close files"
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
