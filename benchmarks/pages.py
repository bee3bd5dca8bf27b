"""The page and the pictures that benchmark programs write into the documentation.

A program owns one section of docs/performance.md, between two marks that do not show; what stands
outside of the marks is written by people and left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "performance.md"


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace what stands between the marks of a section."""
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page.name} has no section {name!r}: put {begin} and {end} into it")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same table for a terminal."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def pyplot() -> Any:
    """Matplotlib without a screen, with pictures that do not differ from run to run by themselves.

    None if it is not installed: the numbers are there all the same.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "telegrad",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, name: str) -> None:
    path = DOCS / name
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    # Matplotlib leaves blanks at the ends of lines.
    lines = (line.rstrip() for line in path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")
