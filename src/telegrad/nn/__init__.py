"""Modules that live on other workers."""

from telegrad.nn.lazy import Lazy
from telegrad.nn.pipeline import Pipeline
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.remote_sequential import RemoteSequential

__all__ = ["Lazy", "Pipeline", "RemoteModule", "RemoteSequential"]
