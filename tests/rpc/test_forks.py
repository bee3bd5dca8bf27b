"""A process that is forked from a worker is none: the job's connections stay the worker's own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch

from telegrad import autograd, rpc
from tests.rpc import functions

pytestmark = pytest.mark.usefixtures("workers")


def said_by_child(ask: Callable[[], object]) -> str:
    """What comes of it in a child of this process."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            said = f"{ask()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def in_a_context() -> None:
    with autograd.context():
        pass


def test_a_forked_process_is_told_and_its_parent_goes_on() -> None:
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    rref.to_here()
    asked: list[Callable[[], object]] = [
        lambda: rpc.rpc_sync("worker1", functions.nothing),
        lambda: rpc.rpc_async("worker1", functions.nothing).wait(),
        lambda: rref.to_here(),
        lambda: rref.rpc_sync().sum(),
        in_a_context,
    ]
    for ask in asked:
        assert "forked from a worker" in said_by_child(ask)
        assert rpc.rpc_sync("worker1", torch.add, args=(1, 1)) == 2


def test_a_forked_process_may_end_in_its_own_way() -> None:
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        del rref
        try:
            rpc.shutdown(timeout=5)
        except rpc.NotInitialized:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert torch.equal(rref.to_here(), torch.ones(2))
