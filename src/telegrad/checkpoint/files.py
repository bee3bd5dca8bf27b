"""The files of a checkpoint: which belong to it, who may write them, whether they are intact.

Files of a save are called `<token>_<worker>_<number>.distcp`, and no two saves have the same token.
Those that the `.metadata` in place mentions are the checkpoint; the others are left-overs.

One save at a time has the directory: two would take each other's files for left-overs. The one that
has it holds a lock of the operating system, which ends with the process however that ends.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from telegrad.checkpoint.errors import CheckpointError

METADATA = ".metadata"
PENDING = ".pending-"
_LOCK = ".lock"
_OURS = r"[0-9a-f]{12}_\d+_\d+\.distcp"
_TORCHS = r"__\d+_\d+\.distcp"
_PIECE = 1 << 20

Place = tuple[str, int]
"""A file of a checkpoint, and where in it a value begins."""
Checksums = dict[Place, int]


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Be the only save into a directory, or fail at once."""
    path = directory / _LOCK
    descriptor = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"Another save into {path.parent} is under way: wait until it has ended, or save "
                "into another directory."
            ) from None
        except OSError:  # A file system without locks; then it is for the user to take care.
            return descriptor
        if _is_there(path, descriptor):
            return descriptor
        os.close(descriptor)  # Who had it before has removed it.


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def read_metadata(directory: Path) -> Metadata:
    try:
        with (directory / METADATA).open("rb") as stream:
            metadata = pickle.load(stream)
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{directory} has no complete checkpoint: no save to it has ended, or it is not the "
            "directory that was given to save."
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{directory / METADATA}, which says what is where in the checkpoint, is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    return metadata


def remove_leftovers(directory: Path) -> None:
    """Remove files of checkpoints that the `.metadata` in place does not mention, if that can be.

    If it cannot be read, nobody knows what is worth keeping, and nothing is removed.
    """
    mentioned: set[str] = set()
    if (directory / METADATA).exists():
        try:
            metadata = read_metadata(directory)
        except CheckpointError:
            return
        mentioned = {info.relative_path for info in metadata.storage_data.values()}
    leftover = re.compile(f"{_OURS}|{_TORCHS}" if mentioned else _OURS)
    for file in directory.glob("*.distcp"):
        if file.name not in mentioned and leftover.fullmatch(file.name):
            with suppress(OSError):
                file.unlink()
    for pending in directory.glob(f"{PENDING}*"):
        shutil.rmtree(pending, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksums_of(directory: Path, infos: Iterable[Any]) -> Checksums:
    """What the bytes of each value come to; `infos` say where they are."""
    return {
        (info.relative_path, info.offset): _sum(directory / info.relative_path, info)
        for info in infos
    }


def check(directory: Path, names: Iterable[str], metadata: Metadata, known: Checksums) -> None:
    """That the bytes of these values are those that were written."""
    wanted = set(names)
    for index, info in metadata.storage_data.items():
        if index.fqn not in wanted:
            continue
        expected = known.get((info.relative_path, info.offset))
        path = directory / info.relative_path
        if expected is not None and _sum(path, info) != expected:
            raise CheckpointError(
                f"{index.fqn} in {path.name} is damaged: its bytes are not those that were written."
            )


def _sum(path: Path, info: Any) -> int:
    total, left = 0, info.length
    with path.open("rb") as stream:
        stream.seek(info.offset)
        while left and (piece := stream.read(min(left, _PIECE))):
            total = zlib.crc32(piece, total)
            left -= len(piece)
    return total


def note_checksums(metadata: Metadata, checksums: Mapping[Place, int]) -> None:
    """In a place that torch, when it reads the checkpoint, does not look at."""
    metadata.telegrad_checksums = dict(checksums)  # type: ignore[attr-defined]


def noted_checksums(metadata: Metadata) -> Checksums:
    """None for a checkpoint that torch wrote."""
    return getattr(metadata, "telegrad_checksums", {})
