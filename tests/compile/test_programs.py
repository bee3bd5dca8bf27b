"""Random programs whose driver is one compiled function: a short part of tests.compile.programs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

from tests.compile.programs import outcome

pytestmark = pytest.mark.usefixtures("job")


def check(seeds: Sequence[int], backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = {seed: outcome(seed, backend) for seed in seeds}
    assert list(outcomes.values()).count("equal") > len(seeds) * 3 / 4, outcomes


def test_a_compiled_driver_finds_what_one_process_finds() -> None:
    check((2, 5, 7, 8), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "count"), [("aot_eager", 20), ("eager", 20), ("inductor", 5)])
def test_many_compiled_drivers_find_what_one_process_finds(backend: str, count: int) -> None:
    check(range(10, 10 + count), backend)
