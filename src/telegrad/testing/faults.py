"""What goes wrong in a simulated run, in words.

    Faults(drop=0.05, duplicate=0.02).kill("b", at=17)
    Faults(delay=0.5).cut("a", "b", after=1.0, lasting=2.0)
    Faults().kill("c", during="autograd")

Packets are lost, doubled and reordered below the session of a link, as on a bad network: the calls
above must not notice. Kills and long cuts they do notice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from telegrad.rpc.arguments import check_whole

BACKWARD = "autograd.pass"


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault strikes: at a message of the run, counted from 1; at the `nth` message whose
    label contains `during`; or after so many seconds of virtual time."""

    at: int | None = None
    during: str | None = None
    nth: int | None = None
    after: float | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.at, self.during, self.after)) != 1:
            raise ValueError("Say when a fault strikes: one of at=, during= or after=.")
        if self.nth is not None and self.during is None:
            raise ValueError("nth= counts the messages of during=, which is missing.")
        for name in ("at", "nth"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=1)
        if self.after is not None:
            _check_time("after", self.after)
        if self.during is not None and (not isinstance(self.during, str) or not self.during):
            raise ValueError(f"during={self.during!r}: give a part of the label of a message.")

    def __str__(self) -> str:
        ways = ("at", "during", "nth", "after")
        said = [(way, getattr(self, way)) for way in ways]
        return ", ".join(f"{way}={value!r}" for way, value in said if value is not None)


@dataclass(frozen=True, slots=True)
class Kill:
    worker: str
    moment: Moment

    def __str__(self) -> str:
        return f"kill({self.worker!r}, {self.moment})"


@dataclass(frozen=True, slots=True)
class Cut:
    one: str
    other: str
    moment: Moment
    lasting: float | None

    def __post_init__(self) -> None:
        if self.one == self.other:
            raise ValueError(f"Worker {self.one!r} has no connection to itself: cut needs two.")
        if self.lasting is not None:
            _check_time("lasting", self.lasting)

    def __str__(self) -> str:
        return f"cut({self.one!r}, {self.other!r}, {self.moment})"


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances per packet, and what happens to workers and links.

    drop        chance that a packet is lost; it is sent again after `resend` seconds
    duplicate   chance that a packet arrives twice
    reorder     chance that a packet is overtaken by those behind it on its own link
    delay       a packet takes up to so many (virtual) seconds
    detect      a killed worker is noticed by each other one within so many seconds
    liveness    a link that is cut for longer than this counts as a lost worker on both ends
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    resend: float = 0.1
    detect: float = 1.0
    liveness: float = 5.0
    kills: tuple[Kill, ...] = field(default=())
    cuts: tuple[Cut, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            _check_chance(name, getattr(self, name))
        for name in ("delay", "resend", "detect"):
            _check_time(name, getattr(self, name))
        if self.liveness != math.inf:
            _check_time("liveness", self.liveness)

    def kill(
        self,
        worker: str,
        *,
        at: int | None = None,
        during: str | None = None,
        nth: int | None = None,
        after: float | None = None,
    ) -> Faults:
        """The worker dies without a word. What it sent just before may or may not arrive.

        Without `nth` the seed chooses one of the first eight messages of `during`.
        """
        moment = Moment(at, _topic(during), nth, after)
        return replace(self, kills=(*self.kills, Kill(worker, moment)))

    def cut(
        self,
        one: str,
        other: str,
        *,
        lasting: float | None = None,
        at: int | None = None,
        during: str | None = None,
        nth: int | None = None,
        after: float | None = None,
    ) -> Faults:
        """The connections between two workers break, and mend after `lasting` seconds, if ever."""
        moment = Moment(at, _topic(during), nth, after)
        return replace(self, cuts=(*self.cuts, Cut(one, other, moment, lasting)))


def _check_chance(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} is a chance and must be in [0, 1), but is {value!r}.")


def _check_time(name: str, value: object) -> None:
    """A fault that strikes at no time would be none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            f"{name} is a time in seconds and must not be negative or endless, but is {value!r}."
        )


def _topic(during: str | None) -> str | None:
    return BACKWARD if during == "backward" else during
