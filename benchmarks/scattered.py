"""Objects that lie far apart in memory: to look at one costs what memory costs, and no more."""

from __future__ import annotations

import random

APART = 8


class Scattered:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def scattered(count: int) -> list[Scattered]:
    """So many, none beside the next."""
    objects = [Scattered() for _ in range(APART * count)]
    random.Random(count).shuffle(objects)
    return objects[:count]


def look_at(objects: list[Scattered]) -> None:
    for each in objects:
        each.number  # noqa: B018
