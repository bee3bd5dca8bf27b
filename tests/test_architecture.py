"""The rooms of the tree are as docs/architecture.md draws them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.documents import ROOT, page

TREE = ROOT / "src" / "telegrad"
TEXT = page("architecture.md")
EVERYWHERE = {"version", "native"}
"""What every room may use."""
LEVELS = [
    line.strip().split(", ")
    for line in TEXT.split("\n\n")[2].splitlines()
    if line.startswith("    ")
]
LEVEL = {room: height for height, rooms in enumerate(reversed(LEVELS)) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(TREE).parts[0].removesuffix(".py")


def rooms_used_by(path: Path) -> set[str]:
    """Those that a file imports when it is itself imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ImportFrom(module="telegrad", names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module)) if module.startswith("telegrad."):
                found.add(module.split(".")[1])
            case ast.Import(names=names):
                found |= {n.name.split(".")[1] for n in names if n.name.startswith("telegrad.")}
    return found - {room_of(path)} - EVERYWHERE


def test_every_room_is_drawn() -> None:
    assert {room_of(path) for path in TREE.rglob("*.py")} == set(LEVEL) | EVERYWHERE | {
        "__init__",
        "__main__",
    }


@pytest.mark.parametrize("room", LEVEL)
def test_imports_point_downward(room: str) -> None:
    for path in TREE.rglob("*.py"):
        if room_of(path) == room:
            upward = {used for used in rooms_used_by(path) if LEVEL[used] >= LEVEL[room]}
            assert not upward, f"{path.relative_to(TREE)} imports {upward}"


def test_the_files_that_the_text_names_are_there() -> None:
    for title, section in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S):
        folders = [TREE / room for room in title.split(", ") if (TREE / room).is_dir()]
        for row in re.findall(r"^\| (`.*?) \|", section, re.M):
            for name in re.findall(r"`(\w+\.py)`", row):
                assert any((folder / name).exists() for folder in folders), f"{title}: {name}"
