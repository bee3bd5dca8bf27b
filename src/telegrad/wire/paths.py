"""Where a value sits in what was to be sent. Searched only when packing has failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any


def path_to(target: object, root: object, root_name: str = "value") -> str:
    """The path of `target` below `root`, as Python would spell it."""
    seen: set[int] = set()
    # The values are kept with their paths, since an id is unique only while its object lives.
    waiting: list[tuple[str, object]] = [(root_name, root)]
    while waiting:
        path, value = waiting.pop()
        if value is target:
            return path
        if id(value) not in seen:
            seen.add(id(value))
            waiting.extend((path + step, child) for step, child in _children(value))
    return f"what is inside {root_name}"


def _children(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield f"[{key!r}]", child
            yield f".keys()[{key!r}]", key
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        for index, child in enumerate(value):
            yield f".{names[index]}" if names else f"[{index}]", child
    elif isinstance(value, set | frozenset):
        for child in value:
            yield f"{{{child!r}}}", child
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
        yield ".__class__", type(value)
    else:
        yield ".__class__", type(value)
