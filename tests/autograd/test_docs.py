"""The code of docs/autograd.md and docs/engine.md runs, and the figure is what is printed."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from telegrad.testing import simulate
from tests import documents

TEXT = documents.page("autograd.md")


def run_blocks(name: str, variables: dict[str, Any]) -> None:
    for block in documents.code_in(documents.page(name)):
        exec(compile(block, f"docs/{name}", "exec"), variables)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables of the page, which is a module, so that its functions can be called."""
    module = ModuleType("autograd_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__dict__


@pytest.mark.parametrize("seed", range(3))
def test_the_page_on_gradients_runs_in_the_simulator(page: dict[str, Any], seed: int) -> None:
    def read() -> str:
        run_blocks("autograd.md", page)
        figure: str = page["figure"]
        page.clear()
        return figure

    result = simulate(read, ("main", "worker1", "worker2"), seed=seed)
    (figure,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert result.value == figure.rstrip()
    assert result.leaks == {}


def test_the_chapter_that_builds_the_engine_runs() -> None:
    run_blocks("engine.md", {})
