"""What each test of torch's suites needs, as `cases.toml` has it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RUN_KINDS = ("core", "applicable", "faults", "tensorpipe")
LEFT_OUT = ("profiler", "torchscript", "cuda")

EXPECTED_DIFFERENCES = {
    ("DistAutogradTest", "backward_unused_send_function"): (
        "AssertionError: False is not true",
        "It asserts that backward hangs where a result is not used. It ends, with the gradients.",
    ),
    ("RpcTest", "disable_gil_profiling"): (
        "telegrad does not measure",
        "It asks how long torch's threads wait for the interpreter lock; telegrad refuses to say.",
    ),
    ("RpcTest", "register_rpc_backend_and_set_and_start_rpc_backend"): (
        "_set_and_start_rpc_agent",
        "It replaces the function that hands a C++ agent to torch; telegrad has neither.",
    ),
}
"""How a test fails that must, and why."""


@dataclass(frozen=True, slots=True)
class Case:
    suite: str
    test: str
    kind: str

    def __str__(self) -> str:
        return f"{self.suite}.test_{self.test}"

    @property
    def difference(self) -> tuple[str, str] | None:
        return EXPECTED_DIFFERENCES.get((self.suite, self.test))


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(Path(__file__).with_name("cases.toml").read_text())


def all_cases() -> list[Case]:
    return [
        Case(suite, test, kind)
        for suite, kinds in _table().items()
        for kind in (*RUN_KINDS, *LEFT_OUT)
        for test in kinds.get(kind, ())
    ]


def cases_to_run() -> list[Case]:
    return [case for case in all_cases() if case.kind in RUN_KINDS]


def quick_cases() -> list[Case]:
    """A part that takes about a minute and has something of everything."""
    table = _table()
    return [case for case in cases_to_run() if case.test in table[case.suite].get("quick", ())]
