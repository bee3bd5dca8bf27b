"""Whether a process lives, as its kernel sees it.

A heartbeat that a process sends itself says less than it seems: an interpreter that is busy in a
long computation does not beat, though it is well. The kernel knows better. For a process on this
host it tells at once whether it is there and whether it has been stopped.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

_STATE, _STARTED = 0, 19
_LONGEST = 4096


class Vital(Enum):
    """What the kernel says of a process."""

    ALIVE = auto()
    STOPPED = auto()
    DEAD = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Process:
    """A process among all that ever were on one kernel: its number, its birth, its namespace."""

    pid: int
    born: int
    namespace: str

    @classmethod
    def own(cls) -> Process:
        fields = _read(os.getpid())
        return cls(os.getpid(), int(fields[_STARTED]) if fields else 0, _namespace())

    @property
    def is_visible(self) -> bool:
        """Whether this process can see it."""
        return bool(self.namespace) and self.namespace == _namespace()

    def vital(self) -> Vital:
        """UNKNOWN for a process that this one cannot see."""
        fields = _read(self.pid) if self.is_visible else None
        if fields is None:
            return Vital.UNKNOWN
        if not fields or int(fields[_STARTED]) != self.born or fields[_STATE] in b"ZXx":
            return Vital.DEAD
        return Vital.STOPPED if fields[_STATE] in b"Tt" else Vital.ALIVE

    def is_gone(self) -> bool:
        """Whether there is no program in a process of that number any more, also if its parent has
        not taken note of its end. Costs less than to look closely; False if that cannot be seen."""
        try:
            os.readlink(f"/proc/{self.pid}/exe")
        except (FileNotFoundError, ProcessLookupError):
            return self.is_visible
        except OSError:
            return False
        return False


def read_process(value: Any) -> Process:
    """As `dataclasses.asdict` wrote it; `ValueError` if it is none."""
    match value:
        case {"pid": int(pid), "born": int(born), "namespace": str(namespace)} if 0 < pid < 1 << 31:
            return Process(pid, born, namespace)
    raise ValueError("what stands for a process describes none")


@functools.cache
def _namespace() -> str:
    """Which processes this one sees: those of one namespace of one boot of one kernel."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _read(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat behind the name, which may hold any character.

    None are there if the process is not. If this process cannot look, that is no answer: one
    that has no descriptor left must not take all others for dead.
    """
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, _LONGEST).rpartition(b")")[2].split()
        finally:
            os.close(file)
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None
