"""What all tests share."""

from __future__ import annotations

import os

# Tests run beside each other and start processes of their own: one thread each is what is left.
os.environ.setdefault("OMP_NUM_THREADS", "1")
