"""Run whole jobs in one process, under every interleaving and fault that a seed describes."""

from telegrad.testing.conveniences import now, seeds, sleep, worker_globals
from telegrad.testing.faults import Faults
from telegrad.testing.simulation import Result, SimulationFailed, WorkerKilled, simulate
from telegrad.testing.trace import Event

__all__ = [
    "Event",
    "Faults",
    "Result",
    "SimulationFailed",
    "WorkerKilled",
    "now",
    "seeds",
    "simulate",
    "sleep",
    "worker_globals",
]
