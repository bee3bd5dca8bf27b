"""`telegrad doctor`: what telegrad needs from a machine, looked at one by one."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from telegrad import native
from telegrad.wire.address import UnixAddress, listen, private_directory
from telegrad.wire.keys import KEY_FILE_VARIABLE, KEY_VARIABLE, JobKeyError, key_from_environment

_ENOUGH_DESCRIPTORS = 1024
_DEVELOPED_ON = "2.13"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `advice` says what to do if it is not good."""

    subject: str
    good: bool
    seen: str
    advice: str = ""


def examine() -> list[Finding]:
    return [_look(subject, look) for subject, look in _CHECKS.items()]


def render(findings: list[Finding]) -> str:
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        mark = "ok  " if finding.good else "FAIL"
        lines.append(f"{mark}  {finding.subject:<{width}}  {finding.seen}")
        if finding.advice and not finding.good:
            lines.append(f"      {'':<{width}}  -> {finding.advice}")
    missing = sum(not finding.good for finding in findings)
    verdict = "this machine is ready" if not missing else f"{missing} to repair"
    return "\n".join([*lines, "", verdict])


class _NotGood(Exception):
    """What was seen, and what to do."""

    def __init__(self, seen: str, advice: str) -> None:
        super().__init__(seen)
        self.seen = seen
        self.advice = advice


def _look(subject: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, True, look())
    except _NotGood as bad:
        return Finding(subject, False, bad.seen, bad.advice)
    except Exception as error:
        return Finding(subject, False, f"{type(error).__name__}: {error}", "see the error")


def _python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _torch() -> str:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 13):
        raise _NotGood(torch.__version__, f"install torch {_DEVELOPED_ON} or later")
    return torch.__version__


def _short_cuts() -> str:
    reasons = {
        native.why_not(name) for name in ("telegrad.wire._native", "telegrad.autograd._graph")
    }
    reasons.discard("")
    if not reasons:
        return "compiled"
    return f"not used, so small messages take longer: {'; '.join(sorted(reasons))}"


def _torch_distributed() -> str:
    if not torch.distributed.is_available():
        raise _NotGood("not part of this torch", "install a torch with distributed support")
    return "available"


def _unix_sockets() -> str:
    directory = private_directory("telegrad-doctor")
    try:
        listen(UnixAddress(str(directory / "socket"))).close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return f"in {directory.parent}"


def _shared_memory() -> str:
    descriptor = os.memfd_create("telegrad-doctor")
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    finally:
        os.close(descriptor)
    return "memfd works"


def _proc() -> str:
    if not os.path.isdir("/proc/self/fd"):
        raise _NotGood("/proc is not mounted", "mount it: mount -t proc proc /proc")
    return "mounted"


def _loopback() -> str:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2),
    ):
        server.settimeout(2)
        server.accept()[0].close()
    return "127.0.0.1 connects"


def _descriptors() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _ENOUGH_DESCRIPTORS:
        raise _NotGood(f"{soft} (at most {hard})", f"run `ulimit -n {_ENOUGH_DESCRIPTORS}`")
    return f"{soft}"


def _key() -> str:
    try:
        key = key_from_environment()
    except JobKeyError as error:
        raise _NotGood("cannot be used", str(error)) from None
    if key is None:
        return (
            "not set; local jobs make their own, jobs over several machines need "
            f"{KEY_VARIABLE} or {KEY_FILE_VARIABLE}"
        )
    return "set, and private"


def _clock() -> str:
    before = time.monotonic()
    time.sleep(0.01)
    passed = time.monotonic() - before
    if not 0.009 < passed < 1:
        raise _NotGood(
            f"10 ms took {passed * 1000:.0f} ms", "the machine is overloaded, or its clock jumps"
        )
    if time.time() < 1_700_000_000:
        raise _NotGood(time.strftime("%Y-%m-%d", time.gmtime()), "set the date of this machine")
    return "steady"


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "torch": _torch,
    "torch.distributed": _torch_distributed,
    "short cuts": _short_cuts,
    "unix sockets": _unix_sockets,
    "shared memory": _shared_memory,
    "/proc": _proc,
    "loopback": _loopback,
    "file descriptors": _descriptors,
    "key": _key,
    "clock": _clock,
}
