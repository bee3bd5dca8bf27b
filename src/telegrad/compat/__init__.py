"""`torch.distributed.rpc` and what belongs to it, on telegrad: nothing in user code changes.

    import telegrad.compat
    telegrad.compat.install()

or, without touching any file, for a script and every process that it starts:

    python -m telegrad compat train.py
    TELEGRAD_COMPAT=1 python train.py
"""

from telegrad.compat.installation import install, is_installed, uninstall
from telegrad.compat.startup import run_script

__all__ = ["install", "is_installed", "run_script", "uninstall"]
