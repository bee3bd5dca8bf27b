"""Each example does what its twin in one process does, and says so to its reader."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_NUMBERS = re.compile(r"^(\D+?) +(-?[\d.]+) +(-?[\d.]+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def importable_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when `python examples/NAME.py` runs: scripts find what stands beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def rows_of(printed: str) -> dict[str, tuple[float, float]]:
    """What was printed of the job and of its twin."""
    return {name: (float(job), float(twin)) for name, job, twin in TWO_NUMBERS.findall(printed)}


SMALL = {
    "split_learning": (("--steps", "5"), "test accuracy"),
    "pipeline_language_model": (("--steps", "2"), "bits per character"),
    "mixture_of_experts": (("--steps", "4"), "test accuracy"),
    "actor_learner": (("--steps", "3"), "moves in balance"),
    "embedding_table": (("--steps", "4", "--rows", "3000"), "bits per character"),
    "gan_gradient_penalty": (("--steps", "2"), "Frechet distance"),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_job_is_equal_to_its_twin(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, metric = SMALL[name]
    code = importlib.import_module(name).main(arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.out
    job, twin = rows_of(printed.out)[metric]
    assert job == pytest.approx(twin, abs=2e-4)
    assert "100%" in printed.err, "the progress bar came to its end"


@pytest.mark.parametrize("victim", ["server1", "trainer2"])
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(
    victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved after 6 steps, killed after 8: these two are made again, with the same losses."""
    story = ("--steps", "10", "--save-every", "3", "--kill-at", "8", "--kill", victim)
    code = importlib.import_module("parameter_server").main(story)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"Started anew: {victim}; the other 3 workers stayed." in printed
    assert "2 steps had to be made again" in printed
    assert "The losses of all 10 steps agree" in printed
    job, twin = rows_of(printed)["test accuracy"]
    assert job == pytest.approx(twin, abs=2e-4)


def test_a_script_that_ended_goes_on_where_it_had_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module("parameter_server").main
    options = ("--save-every", "2", "--checkpoint", str(tmp_path))
    assert main(("--steps", "3", *options)) == 0
    assert main(("--steps", "5", *options)) == 0
    assert "The losses of all 5 steps agree" in capsys.readouterr().out
    for other in (("--steps", "2"), ("--steps", "5", "--seed", "1")):
        with pytest.raises(SystemExit):
            main((*other, *options))
        assert "'steps': 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("split_learning", ("--steps", "0"), "'0' is not a whole number of at least one"),
        ("mixture_of_experts", ("--workers", "-1"), "'-1' is not a whole number"),
        ("parameter_server", ("--kill", "nobody"), "there are server1, server2, trainer1"),
    ],
)
def test_options_that_make_no_sense_are_told(
    name: str, arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(arguments)
    assert told in capsys.readouterr().err


def test_activations_do_not_pass_through_the_driver(capsys: pytest.CaptureFixture[str]) -> None:
    code = importlib.import_module("bytes_per_worker").main(("--rows", "64", "--width", "1024"))
    printed = capsys.readouterr().out
    assert code == 0, printed
    rows = {
        (sender, receiver): (int(through.replace(",", "")), int(past.replace(",", "")))
        for sender, receiver, through, past in re.findall(
            r"^(\w+) +(\w+) +([\d,]+) +([\d,]+)$", printed, re.MULTILINE
        )
    }
    activation = 64 * 1024 * 4
    for pair, (through, past) in rows.items():
        between_workers = "main" not in pair
        assert (past > activation) is between_workers, (pair, past)
        assert (through > activation) is not between_workers, (pair, through)
    assert len(rows) == 6


def test_every_example_is_tried_here() -> None:
    scripts = {script.stem for script in EXAMPLES.glob("*.py")}
    assert scripts == {*SMALL, "parameter_server", "bytes_per_worker", "twins"}


def outcome(*losses: float) -> Any:
    twins = importlib.import_module("twins")
    return twins.Outcome(losses=list(losses), metric=0.5, seconds=1.0)


@pytest.fixture
def show() -> Callable[..., int]:
    shown: Callable[..., int] = importlib.import_module("twins").show
    return shown


@pytest.mark.parametrize("losses", [(1.0, 0.5001), (1.0, float("nan"))])
def test_losses_that_differ_are_called_a_bug(
    show: Callable[..., int], losses: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert show("accuracy", outcome(1.0, 0.5), outcome(*losses)) == 1
    assert "a bug" in capsys.readouterr().out


def test_losses_that_agree_are_no_bug(show: Callable[..., int]) -> None:
    assert show("accuracy", outcome(1.0, 0.5), outcome(1.0, 0.500001)) == 0
