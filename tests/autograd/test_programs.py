"""Random programs: a short seeded part of `python -m tests.autograd.programs`."""

from __future__ import annotations

import warnings
from functools import partial

import pytest

from telegrad.autograd.messages import Mode
from tests.autograd.comparison import compare_one
from tests.autograd.programs import EVERYTHING, outcomes
from tests.autograd.second_order import compare_second_order
from tests.autograd.simulated import compare_simulated


def check(count: int, features: str, compare=compare_one, first: int = 0) -> None:
    chosen = frozenset(features.split(",")) - {""}
    ran = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, outcome in outcomes(range(first, first + count), chosen, compare):
            assert not outcome.startswith("FAILED"), f"seed {seed}, features {features}: {outcome}"
            ran += not outcome.startswith("skipped")
    assert ran > count / 2


@pytest.mark.parametrize(
    "features", ["", "hook,custom,module,passes", "undefined,hook,custom", EVERYTHING]
)
def test_workers_find_what_one_process_finds(features: str) -> None:
    check(150, features)


def test_a_failing_backward_formula_fails_the_pass_and_leaves_nothing() -> None:
    check(150, "fail,hook,custom,late")


def test_fast_mode_gives_the_gradient_or_names_what_was_not_used() -> None:
    check(150, "hook,custom,module", partial(compare_one, mode=Mode.FAST))


def test_gradients_of_gradients() -> None:
    check(80, "custom", compare_second_order)


@pytest.mark.parametrize("features", [EVERYTHING, "fail,undefined,late"])
def test_simulated_workers_find_what_one_process_finds(features: str) -> None:
    check(60, features, compare_simulated)


def test_simulated_workers_in_fast_mode() -> None:
    check(30, "hook,custom,module", partial(compare_simulated, mode=Mode.FAST))


def test_a_bad_network_and_deaths_end_in_the_gradient_or_a_named_error() -> None:
    check(120, EVERYTHING, partial(compare_simulated, with_faults=True))
