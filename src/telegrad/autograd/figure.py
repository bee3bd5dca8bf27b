"""A context as a person reads it: sends and recvs of all workers, numbered as they happened.

A send and the recv that it became on the other worker have one number. A send gets its number when
all recvs that it is made of have theirs, so numbers grow along every chain of calls, and a backward
pass runs through them downwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from telegrad.autograd.describe import Part, Sent

LEGEND = "In backward the gradient of recvN becomes that of sendN, and flows on to what sendN is."


def draw(
    title: str,
    parts: Mapping[int, Part | str],
    roots: Sequence[str],
    name: Callable[[int], str],
) -> str:
    """`parts` by worker, that of the reader first; `roots` are expressions of that worker."""
    numbers = _number(parts)
    lines = [title]
    for worker, part in parts.items():
        lines += ["", f"{name(worker)}:"]
        if isinstance(part, str):
            lines.append(f"  could not be asked: {part}")
            continue
        lines += _rows(_part_rows(part, numbers, name), numbers)
        if roots:
            lines += _rows([("root", "", root) for root in roots], numbers)
            roots = ()
        lines.append(f"  {part.gradients} gradients" if part.gradients != 1 else "  1 gradient")
    return "\n".join([*lines, "", LEGEND])


Row = tuple[str, str, str]


def _part_rows(part: Part, numbers: Mapping[int, int], name: Callable[[int], str]) -> list[Row]:
    rows: list[tuple[int, Row]] = []
    for recv in part.recvs:
        number = numbers[recv.message]
        rows.append((number, (f"recv{number}", f"from {name(recv.peer)}", "")))
    for send in part.sends:
        number = numbers[send.message]
        rows.append((number, (f"send{number}", f"to {name(send.peer)}", send.made_of)))
    # What a worker sends to itself has both: the send comes first.
    return [row for _, row in sorted(rows, key=lambda r: (r[0], r[1][0] < "s"))]


def _rows(rows: Sequence[Row], numbers: Mapping[int, int]) -> list[str]:
    lines = []
    for what, peer, made_of in rows:
        text = re.sub(r"recv#(\d+)", lambda m: f"recv{numbers.get(int(m[1]), '?')}", made_of)
        equals = f"= {text}" if text else ""
        lines.append(f"  {what:<7} {peer:<15} {equals}".rstrip())
    return lines


def _number(parts: Mapping[int, Part | str]) -> dict[int, int]:
    """Messages in an order in which they can have happened."""
    there = [part for part in parts.values() if isinstance(part, Part)]
    sends = [send for part in there for send in part.sends]
    arrived = {recv.message for part in there for recv in part.recvs}
    numbers: dict[int, int] = {}
    # What comes from workers that could not be asked may have been there from the beginning.
    for message in sorted(arrived - {send.message for send in sends}):
        numbers[message] = len(numbers) + 1
    while sends:
        following = _first_ready(sends, numbers)
        numbers[following.message] = len(numbers) + 1
        sends.remove(following)
    return numbers


def _first_ready(sends: Sequence[Sent], numbers: Mapping[int, int]) -> Sent:
    ready = (send for send in sends if all(message in numbers for message in send.needs))
    return next(ready, sends[0])
