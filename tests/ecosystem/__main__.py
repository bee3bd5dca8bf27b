"""Packages that use torch RPC, unmodified, on stock and on telegrad.

    .venv-ecosystem/bin/python tests/ecosystem/__main__.py [PROGRAM ...]

Each program in `programs/` drives the RPC paths of one package and says what it found. It is run
twice, once as it is and once with TELEGRAD_COMPAT=1 in the environment, and must find the same.
`make ecosystem` installs telegrad from a wheel, so this is also how the start-up variable is tried
on an installation as users have it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")
PACKAGES = {
    "torchopt_distributed": "torchopt",
    "fairscale_pipeline": "fairscale",
    "torchrl_collector": "torchrl",
    "torchrl_replay_buffer": "torchrl",
    "torch_geometric_rpc": "torch_geometric",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a program said: its values, or what went wrong."""

    rpc: str = ""
    values: Any = None
    problem: str = ""


def run(program: str, on_telegrad: bool, limit: float) -> Finding:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["TELEGRAD_COMPAT"] = "1" if on_telegrad else "0"
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / f"{program}.py")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        _, errors = process.communicate()
        return Finding(problem=f"no end after {limit:g} s\n{errors[-2000:]}")
    for line in output.splitlines():
        if line.startswith("RESULT ") and process.returncode == 0:
            said = json.loads(line.removeprefix("RESULT "))
            return Finding(said["rpc"], said["values"])
    return Finding(problem=f"exit code {process.returncode}\n{errors[-2000:]}")


def same(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of floats: workers may add in another order."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-7)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def verdict(stock: Finding, telegrad: Finding) -> str:
    if telegrad.problem:
        return "fails on both" if stock.problem else "FAILS ON TELEGRAD"
    if not telegrad.rpc.startswith("telegrad."):
        return "RAN ON STOCK"
    if stock.problem:
        return "fails on stock only"
    return "same" if same(stock.values, telegrad.values) else "DIFFERENT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PACKAGES))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run")
    options = parser.parse_args()
    verdicts: dict[str, str] = {}
    for program in options.programs or PACKAGES:
        stock = run(program, False, options.limit)
        telegrad = run(program, True, options.limit)
        verdicts[program] = verdict(stock, telegrad)
        package = PACKAGES[program]
        print(f"{program:26}{package} {version(package):10}{verdicts[program]}", flush=True)
        for name, finding in (("stock", stock), ("telegrad", telegrad)):
            if finding.problem:
                print(f"  {name}: {finding.problem}")
            elif verdicts[program] != "same":
                print(f"  {name}: {json.dumps(finding.values)[:2000]}")
    return 0 if set(verdicts.values()) == {"same"} else 1


if __name__ == "__main__":
    sys.exit(main())
