"""PyTorch's own test classes, taken from the installed wheel and made ready to run.

Torch's test files mix each suite with a fixture, which names the backend, and with a class that
starts one process per rank. Here the ranks are forked from a process that has imported everything,
so a case takes half a second, and every rank's exit code counts: upstream looks at the first one.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from functools import cache
from types import ModuleType
from typing import Any

_SUITES = "torch.testing._internal.distributed"
_FIXTURE = ("rpc.tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture")
_FAULTY_FIXTURE = ("rpc.faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture")
_MODULES = {
    "RpcTest": "rpc.rpc_test",
    "TensorPipeAgentRpcTest": "rpc.rpc_test",
    "TensorPipeAgentCudaRpcTest": "rpc.rpc_test",
    "DistAutogradTest": "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "rpc.dist_autograd_test",
    "FaultyAgentDistAutogradTest": "rpc.dist_autograd_test",
    "DistOptimizerTest": "rpc.dist_optimizer_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
    "FaultyAgentRpcTest": "rpc.faulty_agent_rpc_test",
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
}
SUITES = tuple(_MODULES)

_STOCK_ENTRANCES = (
    ("torch.distributed.rpc", ("init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown")),
    ("torch.distributed.rpc.api", ("rpc_sync", "rpc_async", "remote", "shutdown", "_all_gather")),
    ("torch.distributed.autograd", ("context", "backward", "get_gradients", "_new_context")),
)


def install_telegrad() -> None:
    """Let telegrad stand for torch RPC, and no test pass on stock by accident."""

    stock = {name: importlib.import_module(name) for name, _ in _STOCK_ENTRANCES}
    from telegrad import compat

    compat.install()
    for name, functions in _STOCK_ENTRANCES:
        assert sys.modules[name] is not stock[name], f"{name} is still stock"
        for function in functions:
            setattr(stock[name], function, _closed(f"{name}.{function}"))


def _closed(name: str) -> Any:
    def entrance(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"stock {name} was reached although telegrad is installed")

    return entrance


def import_all() -> None:
    """Everything but the fixture of the faulty backend: importing that adds a backend."""
    _module(_FIXTURE[0])
    for module in _MODULES.values():
        _module(module)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_SUITES}.{name}")


def tests_of(suite: str) -> list[str]:
    """The names of all tests of a suite, without "test_"."""
    found = getattr(_module(_MODULES[suite]), suite)
    return sorted(name.removeprefix("test_") for name in dir(found) if name.startswith("test_"))


@cache
def _runnable(suite: str) -> Any:
    from torch.multiprocessing import get_context
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    module, fixture = _FAULTY_FIXTURE if suite.startswith("Faulty") else _FIXTURE

    class Ranks(MultiProcessTestCase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(get_context("fork").Process)

        def _check_return_codes(self, *args: Any) -> None:
            super()._check_return_codes(*args)
            codes = [process.exitcode for process in self.processes]
            assert not any(codes), f"ranks ended with the exit codes {codes}"

    tests = getattr(_module(_MODULES[suite]), suite)
    made = type(suite, (tests, getattr(_module(module), fixture), Ranks), {"__module__": __name__})
    # Tests send functions of their class to other ranks, by its name.
    globals()[suite] = made
    return made


def run(suite: str, test: str) -> tuple[str, str]:
    """How a test ended ("passed", "failed", "skipped"), and what it said."""
    case = _runnable(suite)(f"test_{test}")
    result = unittest.TestResult()
    case.run(result)
    problems = [text for _, text in [*result.errors, *result.failures]]
    if problems:
        return "failed", "\n".join(problems)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""
