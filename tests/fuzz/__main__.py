"""Coverage-guided fuzzing of everything that reads what others send.

    python -m tests.fuzz --seconds 300               all targets, one after the other
    python -m tests.fuzz --seconds 60 codec_data     one of them
    python -m tests.fuzz --run crash-1234 codec_data give it one input again

Each target runs in a process of its own, under libFuzzer (atheris): an error that production would
not catch, an input that takes half a minute, or memory beyond two gigabytes ends it, and
the input is left in the directory of `--found`. What the fuzzer learns is kept there too; what is
worth keeping is committed to tests/fuzz/corpus by hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# By name and not by import: what is imported before atheris is not instrumented.
TARGETS = (
    ["frames", "codec_data", "codec_code", "handshake", "session", "references", "calls", "worker"]
)  # fmt: skip
CORPUS = Path(__file__).parent / "corpus"
SLOWEST = 30
MEMORY = 2048


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"some of {TARGETS}")
    parser.add_argument("--seconds", type=int, default=300, help="for all targets together")
    parser.add_argument("--found", type=Path, help="where to keep what is found")
    parser.add_argument("--run", type=Path, help="run one input instead")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.targets or TARGETS
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        parser.error(f"there is no target {unknown[0]!r}: choose from {', '.join(TARGETS)}")
    if options.inside is not None:
        fuzz(targets[0], options.inside)
    if options.run:
        return subprocess.call(_command(targets[0], [str(options.run)]))
    found = options.found or Path(tempfile.mkdtemp(prefix="telegrad-fuzz-"))
    share = max(1, options.seconds // len(targets))
    failed = [target for target in targets if _fuzz_elsewhere(target, found / target, share)]
    print(f"fuzzed {len(targets)} targets for {share} s each; inputs are in {found}")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return bool(failed)


def _command(target: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "tests.fuzz", target, "--inside", *arguments]


def _fuzz_elsewhere(target: str, found: Path, seconds: int) -> int:
    found.mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={SLOWEST}",
        f"-rss_limit_mb={MEMORY}",
        "-max_len=4096",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={found}/",
    ]
    command = _command(target, [*flags, str(found), str(CORPUS / target)])
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    counts = dict(re.findall(r"stat::(\w+): +(\d+)", done.stdout))
    print(
        f"{target:12} {counts.get('number_of_executed_units', '?'):>9} inputs, "
        f"{counts.get('new_units_added', '?'):>5} reached new code, "
        f"slowest {counts.get('slowest_unit_time_sec', '?')} s, "
        f"{counts.get('peak_rss_mb', '?')} MB",
        flush=True,
    )
    if done.returncode:
        print(done.stdout)
    return done.returncode


def fuzz(target: str, arguments: list[str]) -> None:
    """In the process that fuzzes: does not return."""
    import warnings

    import atheris
    import torch  # noqa: F401 (not to be instrumented)

    warnings.filterwarnings("ignore")
    with atheris.instrument_imports(include=["telegrad"]):
        from tests.fuzz.targets import ALL
    atheris.Setup([sys.argv[0], *arguments], ALL[target])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
