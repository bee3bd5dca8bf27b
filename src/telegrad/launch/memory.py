"""Memory that a worker frees stays with it for a while.

A step of training frees what it made, and the next one makes the same again. glibc gives back to
the system what lies free at the end of its heap, from 128 KB on, and the system then hands it out
again page by page, each one cleared first. A worker has nothing better to do with that memory, so
it keeps up to `KEPT_BYTES`. Blocks of more than `LARGEST_KEPT` are given back at once, as ever.
"""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 1 << 28
LARGEST_KEPT = 1 << 25
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Have this process do so, unless its user has said how it is to be, or it has no glibc."""
    if any(name in os.environ for name in _OWN_SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)
