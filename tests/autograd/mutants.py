"""Is a wrong engine caught? Breaks a copy of the engine in known ways and runs programs on it.

    python -m tests.autograd.mutants
    python -m tests.autograd.mutants --count 1000 --only gate

Each mutant removes one thing that the engine's essays call necessary. A mutant that no program
notices means either that the programs are too tame or that the essay is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFAULT = "hook,custom,module,passes,late,post"


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    options: tuple[str, ...] = ("--features", DEFAULT)


MUTANTS = (
    Mutant("no gate above the leaves", "local.py", "if stages.gate is not None:", "if False:"),
    Mutant(
        "the gate always opens",
        "local.py",
        "if group.stages.hooked_leaves or any(",
        "if False and any(",
    ),
    Mutant(
        "a partly absent message flows out of its send",
        "local.py",
        "if source.state is not State.GRADIENT or any(g is None for g in source.gradients):",
        "if source.state is not State.GRADIENT:",
    ),
    Mutant(
        "kept gradients of nodes that ran are used again",
        "local.py",
        "return node in group.leaves or bool(stages.masks[node] & ~stages.ran)",
        "return True",
    ),
    Mutant(
        "absence that comes during a call counts for that call",
        "local.py",
        "        stages.ran = stages.entered | stages.absent\n",
        "        stages.ran = stages.entered | group.mask_of(State.ABSENT)\n",
    ),
    Mutant(
        "a level that waited for an absent source stays idle",
        "local.py",
        "not level & pending and level & ~ran and level & ~absent for",
        "not level & pending and level & ~(ran | absent) for",
    ),
    Mutant(
        "unreachable recvs are not answered",
        "local.py",
        "            if not stages.masks[recv] & ~settled:\n",
        "            if False:\n",
    ),
    Mutant(
        "recvs that did not run are not answered at the end",
        "local.py",
        "        self._open -= 1\n        for recv in group.recvs:\n",
        "        self._open -= 1\n        for recv in ():\n",
    ),
    Mutant(
        "edges into leaves are not cut",
        "plan.py",
        "if node is not None and (masks[node] != mask or node in leaves)",
        "if node is not None and masks[node] != mask",
    ),
    Mutant(
        "leaves with hooks do not join sources",
        "plan.py",
        "if not torch_private.tensor_hooks(node.variable):\n                continue",
        "if True:\n                continue",
    ),
    Mutant(
        "leaves with both kinds of hooks are not held back",
        "local.py",
        "        return set(accumulating_for_real(hooked))\n",
        "        return set()\n",
    ),
    Mutant(
        "late messages are not answered",
        "service.py",
        "                participant.deliver(record.peer, Missed(record))\n",
        "                pass\n",
    ),
    Mutant(
        "an acknowledgement does not wait for those of others",
        "backward.py",
        "return self.complete and not self._unacknowledged",
        "return self.complete",
    ),
    Mutant(
        "gradients that cross are not recorded with create_graph",
        "service.py",
        "        return context.recording\n",
        "        return None\n",
        ("--features", "custom", "--second-order"),
    ),
    Mutant(
        "fast mode accepts absence",
        "participant.py",
        "            raise self._unused(record)\n",
        "            return\n",
        ("--features", "hook", "--fast"),
    ),
)


def caught(mutant: Mutant, count: int) -> bool:
    """Run programs on a copy of telegrad that is broken in this way."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src" / "telegrad", Path(folder) / "telegrad")
        target = Path(folder) / "telegrad" / "autograd" / mutant.file
        source = target.read_text()
        if source.count(mutant.old) != 1:
            raise SystemExit(f"mutant {mutant.name!r} no longer matches {mutant.file}: update it")
        target.write_text(source.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "tests.autograd.programs", "--count", str(count)]
        try:
            run = subprocess.run(
                [*command, *mutant.options],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": folder},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
    return run.returncode != 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="programs for each mutant")
    parser.add_argument("--only", default="", help="mutants whose name has this in it")
    given = parser.parse_args(arguments)
    survivors = 0
    for mutant in MUTANTS:
        if given.only in mutant.name:
            found = caught(mutant, given.count)
            survivors += not found
            print(f"{'caught' if found else 'SURVIVED'}: {mutant.name}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
