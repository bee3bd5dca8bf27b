"""The `telegrad` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from telegrad.version import __version__

_EXAMPLES = """\
examples:
  telegrad demo                          train a model that is split over three workers
  telegrad run train.py --workers 4      run a script that calls telegrad.run(main)
  telegrad run train.py -w 4 --lr 0.1    what follows goes to the script
  telegrad compat old.py                 run a script written for torch.distributed.rpc
  telegrad doctor                        check whether this machine is ready

`telegrad COMMAND --help` tells more about each.
"""

_RUN_HELP = """\
Runs SCRIPT with Python. Where it calls telegrad.run(main) without workers=, it gets N workers:

    import telegrad

    def main():
        ...                     # calls worker1 ... workerN

    if __name__ == "__main__":
        telegrad.run(main)

A script that passes workers= keeps its own number, and is told so if it is another. The workers are
processes on this machine. They end when main does.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    ours, scripts = split_arguments(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(ours)
    options.arguments = scripts
    code: int = options.command(options)
    return code


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What telegrad reads, and what belongs to the script of `telegrad run` or `compat`.

    The script's begin as soon as both SCRIPT and --workers N are there, so that the script may
    have options of the same names. argparse cannot be told so.
    """
    if arguments and arguments[0] == "compat":
        return ["compat"], list(arguments[1:])
    if not arguments or arguments[0] != "run":
        return list(arguments), []
    has_script = has_workers = False
    position = 1
    while position < len(arguments) and not (has_script and has_workers):
        word = arguments[position]
        if word in ("-w", "--workers"):
            has_workers = True
            position += 1
        elif word.startswith(("-w", "--workers=")):
            has_workers = True
        elif not word.startswith("-"):
            has_script = True
        position += 1
    return list(arguments[:position]), list(arguments[position:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="telegrad",
        description="Differentiable remote calls for PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"telegrad {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_doctor(commands)
    _add_compat(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a model that is split over local workers",
        description="Trains one model on handwritten digits twice: split over workers, and in "
        "one process. Shows that both learn the same.",
    )
    demo.add_argument("--workers", "-w", type=_count, default=3, metavar="N", help="default: 3")
    demo.add_argument("--epochs", type=_count, default=15, metavar="N", help="default: 15")
    demo.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    demo.set_defaults(command=_demo)


def _add_run(commands: _Commands) -> None:
    run = commands.add_parser(
        "run",
        help="run a script with N local workers",
        description=_RUN_HELP,
        usage="telegrad run SCRIPT --workers N [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("script", metavar="SCRIPT", type=Path)
    run.add_argument("--workers", "-w", type=_count, required=True, metavar="N")
    run.set_defaults(command=_run)


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine is ready",
        description="Checks what telegrad needs from this machine and says what to do about "
        "what is missing. The exit code is 1 if something is.",
    )
    doctor.set_defaults(command=_doctor)


def _add_compat(commands: _Commands) -> None:
    compat = commands.add_parser(
        "compat",
        help="run a script written for torch.distributed.rpc on telegrad",
        usage="telegrad compat SCRIPT [ARGUMENT ...]",
    )
    compat.set_defaults(command=_compat)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _demo(options: argparse.Namespace) -> int:
    from telegrad.demo import demo

    return demo(workers=options.workers, epochs=options.epochs, seed=options.seed)


def _run(options: argparse.Namespace) -> int:
    if not options.script.is_file():
        print(f"telegrad run: there is no script {options.script}", file=sys.stderr)
        return 2
    environment = {**os.environ, "TELEGRAD_WORKERS": str(options.workers)}
    sys.stdout.flush()
    # The script takes the place of this process: its exit code and signals are its own.
    command = [sys.executable, str(options.script), *options.arguments]
    os.execve(sys.executable, command, environment)


def _compat(options: argparse.Namespace) -> int:
    from telegrad.compat import run_script

    return run_script(options.arguments)


def _doctor(options: argparse.Namespace) -> int:
    from telegrad.doctor import examine, render

    findings = examine()
    print(render(findings))
    return 0 if all(finding.good for finding in findings) else 1
