"""Who has to go when workers lose each other: a core without I/O.

A worker that dies is gone for everyone. But when only the way between two workers is cut, or the
job falls into two parts, each side would take the other for dead and go on by itself: values would
be kept and dropped twice, and steps of training made by two halves. So a worker that hears nothing
from another decides alone, but by rules that make all decide alike:

1.  *Somebody else hears it.* Then it lives, and the way between the two is cut. Of the two, the one
    with the higher id goes: the other tells all workers to be done with it, or it leaves by itself,
    whichever comes first. Both sides apply the same rule to the same pair, so they agree.
2.  *Nobody hears it.* Then it is gone, or a part of the job is cut off, perhaps ours. Those who
    are silent are counted against those who are heard, this worker included. The larger part goes
    on; of two equal ones that with the lowest id. Who is in the other part leaves: it loses all
    others at once, each with an error that says so, and may join anew.

Only silence is judged so. A process that has ended, refuses connections or said farewell is lost
without a question.

What must never happen: two workers that both go on and each count the other as lost.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from enum import Enum, auto


class Verdict(Enum):
    LOSE = auto()  # it is gone
    EXPEL = auto()  # it lives, but not with us: tell all others
    LEAVE = auto()  # this worker is the one that goes


def judge(
    me: int, suspect: int, heard_elsewhere: bool, heard: AbstractSet[int], silent: AbstractSet[int]
) -> Verdict:
    """What to do about a worker that is silent.

    `heard_elsewhere`: another worker hears it. `heard` and `silent` are the others that this worker
    hears, and those that it did hear and does not any more.
    """
    if heard_elsewhere:
        return Verdict.EXPEL if me < suspect else Verdict.LEAVE
    here = {me, *heard} - {suspect}
    there = {suspect, *silent}
    if len(here) != len(there):
        return Verdict.LOSE if len(here) > len(there) else Verdict.LEAVE
    return Verdict.LOSE if min(here) < min(there) else Verdict.LEAVE
