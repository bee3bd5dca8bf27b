"""Run whole jobs in one process, under every interleaving and fault that a seed describes.

`interfere` brings faults into jobs of real processes.
"""

from telegrad.testing.conveniences import now, seeds, sleep, worker_globals
from telegrad.testing.fake_job import FakeJob, fake_job
from telegrad.testing.faults import Faults
from telegrad.testing.interference import Delay, Lose, Message, MessageLost, interfere
from telegrad.testing.simulation import Result, SimulationFailed, WorkerKilled, simulate
from telegrad.testing.trace import Event

__all__ = [
    "Delay",
    "Event",
    "FakeJob",
    "Faults",
    "Lose",
    "Message",
    "MessageLost",
    "Result",
    "SimulationFailed",
    "WorkerKilled",
    "fake_job",
    "interfere",
    "now",
    "seeds",
    "simulate",
    "sleep",
    "worker_globals",
]
