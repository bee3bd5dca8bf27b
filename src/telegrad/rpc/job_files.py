"""What a job keeps on a host: a directory with the sockets of its workers and, if it was given no
key, the one that it made.

The last worker to leave removes the directory. If every worker of a job was killed, another job of
the same user does so when it starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from telegrad.wire.address import job_directory
from telegrad.wire.keys import JobKey

KEY_FILE = "key"
ABANDONED_AFTER = 60.0


def write_key(job: str, key: JobKey) -> None:
    descriptor = os.open(job_directory(job) / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key.hex())


def read_key(job: str) -> JobKey | None:
    """None if there is none. To look makes the directory, which then goes again."""
    directory = job_directory(job)
    try:
        return JobKey(bytes.fromhex((directory / KEY_FILE).read_text()))
    except OSError:
        with contextlib.suppress(OSError):
            directory.rmdir()
        return None


def remove_if_last(directory: Path) -> None:
    """The last worker of a job on this host removes what the job kept there."""
    with contextlib.suppress(OSError):
        sockets = [path for path in directory.iterdir() if path.name != KEY_FILE]
        if all(map(_is_abandoned, sockets)):
            for path in (*sockets, directory / KEY_FILE):
                path.unlink(missing_ok=True)
            directory.rmdir()


def _is_abandoned(path: Path) -> bool:
    """Whether a socket's process is gone: one that was killed leaves its file behind."""
    if path.suffix != ".sock":
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def remove_abandoned(parent: Path) -> None:
    """Remove what jobs of this user left behind when all of their workers were killed."""
    for directory in parent.glob("telegrad-????????????????"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            idle = time.time() - status.st_mtime > ABANDONED_AFTER
            # A job without sockets may be called over TCP only: its key is still wanted.
            if idle and status.st_uid == os.getuid() and any(directory.glob("*.sock")):
                remove_if_last(directory)
