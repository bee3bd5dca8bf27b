"""The `telegrad` command, as a person meets it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from telegrad import doctor
from telegrad.cli import main, split_arguments
from telegrad.version import __version__
from tests.scripts import run_script


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script("-m", "telegrad", *arguments)


def test_version_is_printed() -> None:
    assert command("--version").stdout.strip() == f"telegrad {__version__}"


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0
    assert "telegrad run train.py --workers 4" in capsys.readouterr().out


def test_a_missing_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([])
    assert exited.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_bad_number_of_workers_is_named(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "x.py", f"--workers={number}"])
    assert f"{number!r} is not a number of 1 or more" in capsys.readouterr().err


def test_run_names_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nowhere.py", "--workers", "2"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_run_passes_workers_arguments_and_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\nprint(os.environ['TELEGRAD_WORKERS'], sys.argv[1:])\nsys.exit(7)\n"
    )
    done = command("run", str(script), "--workers", "3", "--lr", "0.1", "data")
    assert done.stdout.strip() == "3 ['--lr', '0.1', 'data']"
    assert done.returncode == 7


def test_options_after_script_and_workers_are_the_scripts_own() -> None:
    ours, scripts = split_arguments(["run", "-w", "2", "x.py", "-w", "9", "--help"])
    assert ours == ["run", "-w", "2", "x.py"]
    assert scripts == ["-w", "9", "--help"]


def test_doctor_finds_this_machine_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TELEGRAD_KEY", raising=False)
    monkeypatch.delenv("TELEGRAD_KEY_FILE", raising=False)
    findings = doctor.examine()
    assert [finding for finding in findings if not finding.good] == []
    assert doctor.render(findings).endswith("this machine is ready")


def test_doctor_says_what_to_do_about_a_key_that_others_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    path.write_text("00" * 32)
    path.chmod(0o644)
    monkeypatch.delenv("TELEGRAD_KEY", raising=False)
    monkeypatch.setenv("TELEGRAD_KEY_FILE", str(path))
    assert main(["doctor"]) == 1
    assert f"chmod 600 {path}" in capsys.readouterr().out
