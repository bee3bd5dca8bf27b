"""The part of PyTorch's own suites that every change has to pass; `make conformance` runs all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import suites
from tests.conformance.cases import Case, all_cases, quick_cases
from tests.conformance.nursery import Nursery

LIMIT = 60.0


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    logs: Path = tmp_path_factory.mktemp("conformance")
    nursery = Nursery("telegrad", logs)
    yield nursery
    nursery.close()


@pytest.mark.parametrize("case", quick_cases(), ids=str)
def test_pytorchs_own(case: Case, nursery: Nursery) -> None:
    outcome = nursery.run(case.suite, case.test, LIMIT)
    assert outcome.status == "passed", outcome.detail


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_test_of_the_installed_torch_has_a_kind(suite: str) -> None:
    known = {case.test for case in all_cases() if case.suite == suite}
    assert set(suites.tests_of(suite)) == known
