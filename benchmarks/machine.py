"""What a reader has to know of the machine that numbers come from; nothing that names it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def describe() -> str:
    versions = ", ".join(
        f"{name} {version}"
        for name in ("torch", "ray", "grpcio")
        if (version := _version(name)) is not None
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GB; "
        f"Linux {platform.release().split('-')[0]}; Python {platform.python_version()}; {versions}"
    )


def load() -> float:
    """Processes that wanted a core, on average over the last minute."""
    return os.getloadavg()[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The name that the kernel has for it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
