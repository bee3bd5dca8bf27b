"""Looking at the file of a `file://` store before torch does.

Torch's FileStore appends entries to a file and reads all that others have appended. An entry is a
key and a value, each behind its length in four bytes. Torch believes these lengths: where they lead
beyond the end of the file it reads on for ever, in C++, where nobody can stop it. That is so with
any other file that an address names by mistake, and with a store whose writer was killed in the
middle of an entry. So a file that is there must be whole before torch opens it.

Writers lock the file, and so does who looks: an entry that is being written is no torn one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import time
from pathlib import Path

from telegrad.rpc.errors import RendezvousError
from telegrad.wire.interrupts import may_be_interrupted

_LENGTH = struct.Struct("=I")
_PAUSE = 0.01


def check_store_file(url: str, path: Path, seconds: float) -> None:
    """`RendezvousError` if torch could not meet in that file, or would wait for it for long."""
    if not path.parent.is_dir():
        # Torch would wait five minutes for it to come.
        raise RendezvousError(
            f"init_method={url!r}: there is no directory {str(path.parent)!r}; make it, or name a "
            "file in one that all workers see"
        )
    try:
        # A pipe would wait here for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return  # It is not there yet, or torch says why it cannot be opened.
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RendezvousError(f"init_method={url!r}: {str(path)!r} is no file; name one")
        if not _lock(descriptor, seconds):
            raise RendezvousError(
                f"init_method={url!r}: another process has had the file {str(path)!r} locked for "
                f"{seconds:g} s; end it, or name another file"
            )
        if not _is_whole(descriptor):
            raise RendezvousError(
                f"init_method={url!r}: the file {str(path)!r} is there, and it is no store of "
                "torch's, or one that was not written to its end; name a file that does not exist, "
                "or remove this one if nobody needs it"
            )
    finally:
        os.close(descriptor)


@may_be_interrupted
def _lock(descriptor: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE)
        except OSError:
            return True  # Where files cannot be locked torch says so.


def _is_whole(descriptor: int) -> bool:
    """Whether the file is made of entries, each with a key, to its last byte."""
    size = os.fstat(descriptor).st_size
    if not size:
        return True
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < size:
            value = _end_of(data, at)
            end = _end_of(data, value)
            if value == at + _LENGTH.size or end > size:
                return False
            at = end
    return True


def _end_of(data: mmap.mmap, at: int) -> int:
    """Where what begins there ends, by its own account."""
    if at + _LENGTH.size > len(data):
        return len(data) + 1
    length: int = _LENGTH.unpack_from(data, at)[0]
    return at + _LENGTH.size + length
