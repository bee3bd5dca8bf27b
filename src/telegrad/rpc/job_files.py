"""What a job keeps on a host: a directory with the sockets of its workers and, if it was given no
key, the one that it made.

The last worker to leave removes the directory. If every worker of a job was killed, another job of
the same user does so when it starts. Whether a worker is there is seen by its socket, or by its
*mark*, a file that names its process: who is called over TCP only has no socket, and who founds a
job has none yet. So a directory in which nobody has either is nobody's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path

from telegrad.rpc.vitals import Process, Vital, read_process
from telegrad.wire.address import job_directory
from telegrad.wire.keys import JobKey

KEY_FILE = "key"
MARK = ".process"
ABANDONED_AFTER = 60.0


def write_key(job: str, key: JobKey) -> None:
    directory = job_directory(job)
    leave_mark(directory)
    descriptor = os.open(directory / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key.hex())


def leave_mark(directory: Path) -> None:
    """Say that this process needs what is in the directory, until `remove_if_last`."""
    me = Process.own()
    descriptor = os.open(directory / f"{me.pid}-{me.born}{MARK}", os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(asdict(me)))


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
    """This process leaves; the last worker of a job on this host removes what the job kept."""
    with contextlib.suppress(OSError):
        _remove_if_abandoned(directory, Process.own())


def _remove_if_abandoned(directory: Path, leaving: Process | None = None) -> None:
    if leaving is not None:
        # Before the look at the others: of two that leave at once, the later sees neither.
        for path in directory.iterdir():
            if _process_of(path) == leaving:
                path.unlink(missing_ok=True)
    others = [path for path in directory.iterdir() if path.name != KEY_FILE]
    if all(map(_is_abandoned, others)):
        for path in (*others, directory / KEY_FILE):
            path.unlink(missing_ok=True)
        directory.rmdir()


def _process_of(path: Path) -> Process | None:
    """Whose mark it is."""
    if path.suffix == MARK:
        with contextlib.suppress(OSError, ValueError):
            return read_process(json.loads(path.read_text()))
    return None


def _is_abandoned(path: Path) -> bool:
    """Whether a file's process is gone: one that was killed leaves its socket and mark behind, and
    one that leaves has just taken them away."""
    if path.suffix != ".sock":
        process = _process_of(path)
        return not path.exists() if process is None else process.vital() is Vital.DEAD
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
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
            if idle and status.st_uid == os.getuid():
                _remove_if_abandoned(directory)
