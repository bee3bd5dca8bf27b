"""What a forked worker does before and after it serves."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from typing import TextIO

import numpy
import torch

from telegrad.launch.job import Conduct, Orders, Seat
from telegrad.launch.lifeline import die_with_parent, watch
from telegrad.launch.memory import keep_freed_memory
from telegrad.launch.script import install_main


def work(seat: Seat, conduct: Conduct, orders: Orders, lifeline: int, server: int) -> int:
    """Take the seat and serve until the job ends. Returns the exit code of the process."""
    try:
        die_with_parent(server)
        watch(lifeline)
        _settle(seat, orders)
        conduct.join(seat)
        conduct.serve(seat)
        return 0
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as in a process that was started without one
                stream.flush()


def _settle(seat: Seat, orders: Orders) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _show_lines_at_once(sys.stdout)
    keep_freed_memory()
    os.environ["OMP_NUM_THREADS"] = str(orders.threads)
    torch.set_num_threads(orders.threads)
    seed_everything(orders.seed + seat.rank)
    if orders.main is not None and orders.main_in_each:
        install_main(orders.main)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _show_lines_at_once(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)
